"""The page of a search for compression: its points, the line that none may cross, and every decision."""

from __future__ import annotations

import re
from typing import Any

import pytest
from page_tables import cells_of

from anabranch.reports.search import search_html

DECISIONS = (
    {"kept": 1.0, "bits": 32, "update_bytes": 4000, "taken": True, "why": "the mildest"},
    {"kept": 0.1, "bits": 8, "update_bytes": 200, "taken": True, "why": "enough is left"},
    {"kept": 0.05, "bits": 4, "update_bytes": 90, "taken": False, "why": "too much <is> lost"},
)


def searched(metric: str, mode: str, values: tuple[float, ...], loss_max: float) -> str:
    """The page of a search that came to these values."""
    decisions: list[dict[str, Any]] = [
        {**decision, metric: value} for decision, value in zip(DECISIONS, values, strict=True)
    ]
    told = {"kept": 0.1, "bits": 8, "loss_max": loss_max, "metric": metric, "mode": mode}
    return search_html({**told, "decisions": decisions})


def test_the_table_has_every_decision() -> None:
    page = searched("accuracy", "max", (0.9, 0.89, 0.7), 0.02)
    assert "found: kept 0.1, 8 bits" in page
    assert cells_of(page, "Decisions") == [
        ["kept", "bits", "accuracy", "an update", "taken", "why"],
        ["1", "32", "90.00 %", "4.00 kB", "yes", "the mildest"],
        ["0.1", "8", "89.00 %", "200 B", "yes", "enough is left"],
        ["0.05", "4", "70.00 %", "90 B", "", "too much <is> lost"],
    ]


@pytest.mark.parametrize(
    ("metric", "mode", "values", "limit", "side"),
    [
        ("accuracy", "max", (0.9, 0.89, 0.7), "88 %", "below"),
        ("mse", "min", (0.5, 0.51, 0.9), "0.52", "above"),
    ],
)
def test_the_line_is_as_far_from_the_mildest_as_may_be_lost(
    metric: str, mode: str, values: tuple[float, ...], limit: str, side: str
) -> None:
    page = searched(metric, mode, values, 0.02)
    assert re.findall(r">target (.*?)</text>", page) == [limit]
    assert f"{side} the dashed line more {metric} is lost than is allowed" in page
    assert len(re.findall(r'class="dot', page)) == 2, "those that were taken"
