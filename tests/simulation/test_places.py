"""Places that are few: everybody gets one in turn, and they do not stay empty for it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from places import Places, use_of_places

from anabranch.core.config.ranges import TASKS


@lru_cache
def in_turn(clients: int, places: int) -> Places:
    """A fleet that waits in a line."""
    return use_of_places(clients, places)


def test_nobody_starves_where_places_are_few() -> None:
    with_line, without = in_turn(100, 5), use_of_places(100, 5, line=False)
    assert min(without.grants) == 0  # whoever has just pushed is there first
    assert min(with_line.grants) >= max(with_line.grants) - 1
    assert sum(with_line.grants) >= 0.96 * sum(without.grants)


@pytest.mark.parametrize(("clients", "places", "idle_max"), [(8, 6, 0.03), (100, 5, 0.04)])
def test_places_do_not_stay_empty(clients: int, places: int, idle_max: float) -> None:
    assert in_turn(clients, places).idle < idle_max


def test_devices_that_vanish_while_they_wait_hold_nobody_up() -> None:
    rough: dict[str, Any] = {"dropout": 0.1, "availability": 0.8, "availability_period_s": 100.0}
    assert use_of_places(100, 5, **rough).idle < 0.04


def test_devices_of_one_speed_that_wait_are_no_herd() -> None:
    """Their places are freed at one moment, and then none for the minute that a task takes."""
    herd: dict[str, Any] = {"virtual_s": 400.0, "step_time_s": 30.0, "speed_ratio": 1.0}
    rules: list[dict[str, Any]] = [{"line": False}, {}, {"windows": TASKS}]
    none, now, before = (use_of_places(100, 50, **herd, **rule) for rule in rules)
    assert sum(now.grants) >= 0.98 * sum(none.grants)
    assert max(now.grants) - min(now.grants) <= 1
    assert now.refused < 15 * sum(now.grants) < before.refused / 2
