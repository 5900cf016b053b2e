"""docs/systems.md says of every system what became of it, and where that is seen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anabranch.strategies.registry import STRATEGIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
STATES = ("works", "partly", "not built", "out")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and line.count("|") == 6 and not line.startswith(("| system", "|---"))
]


def test_the_page_has_its_rows() -> None:
    assert len(ROWS) > 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_a_row_says_what_became_of_it_and_what_is_here_is_seen(row: list[str]) -> None:
    system, _, here, state, see = row
    assert state.startswith(STATES), f"{system}: {state}"
    if state.startswith(("works", "partly")):
        assert here
        assert see or "study](" in state, f"{system}: neither a command nor a page"
    if state.startswith("not built"):
        assert not see


def test_every_number_is_a_line_to_try() -> None:
    named = set(re.findall(r"\[(\d+)\]\(#try-them\)", PAGE))
    assert named == set(re.findall(r"  # (\d+)$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("strategy", STRATEGIES.built_in)
def test_every_strategy_has_a_row(strategy: str) -> None:
    assert any(f"`{strategy}`" in row[2] for row in ROWS)
