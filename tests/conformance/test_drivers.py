"""One suite for every driver: the same things said to each get the same answers and leave the same journal.

What a driver answers is compared with what is written here, its journal with that of the live server, record
by record, but for what time it was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drivers import Driver, driver, story

from anabranch.core.config import Config, merge

DRIVERS = ("live", "local", "simulated")
INT8 = {"uplink": {"codec": "int8"}}


def config(**tables: Any) -> Config:
    base = {"strategy": {"name": "fedasync"}, "server": {"drain_s": 1.0}}
    return merge([("test", base), ("scenario", tables)])


def wrong_codec(run: Driver) -> list[str]:
    """Refused before a byte of it is taken, and not on record; the task is still open."""
    run.enrol("a")
    return [
        run.ask("a", "t-1"),
        run.push("a", "t-1", "u-1", codec="int4"),
        run.push("a", "t-1", "u-1", codec="raw"),
    ]


def bad_values(run: Driver) -> list[str]:
    """On record with its flaw: the task is closed."""
    run.enrol("a")
    return [
        run.ask("a", "t-1"),
        run.push("a", "t-1", "u-1", value=float("nan"), codec="raw"),
        run.push("a", "t-1", "u-2"),
    ]


def too_large_values(run: Driver) -> list[str]:
    """As those that are no numbers."""
    run.enrol("a")
    return [run.ask("a", "t-1"), run.push("a", "t-1", "u-1", value=1e30)]


Scenario = Callable[[Driver], list[str]]
SCENARIOS: dict[Scenario, tuple[Config, list[str]]] = {
    wrong_codec: (config(**INT8), ["of version 0", "InvalidUpdate", "published"]),
    bad_values: (config(), ["of version 0", "InvalidUpdate", "UnknownTask"]),
    too_large_values: (config(), ["of version 0", "InvalidUpdate"]),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_every_driver_answers_and_logs_the_same(scenario: Scenario, tmp_path: Path) -> None:
    settings, expected = SCENARIOS[scenario]
    journals = {}
    for name in DRIVERS:
        with driver(name, settings, tmp_path / name) as run:
            assert scenario(run) == expected, name
        journals[name] = story(run.journal())
    assert journals["local"] == journals["live"]
    assert journals["simulated"] == journals["live"]
