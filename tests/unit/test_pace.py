"""How soon a waiting device comes back: quick and slow devices keep the places in use, each in its turn."""

from __future__ import annotations

from itertools import pairwise

import pytest
from rooms import Room, Worked, work

from anabranch.core.config.ranges import MINUTE, TASKS
from anabranch.core.effects import Refused
from anabranch.core.engine.pace import ASKS_PER_S

PLACES, UNTIL_S = 8, 200.0
QUICK, SLOW = {f"quick-{n}": 1.0 for n in range(100)}, {f"slow-{n}": 15.0 for n in range(10)}


def fleet(windows: str, begins_s: float) -> Worked:
    """What a hundred quick devices and ten slow ones come to."""
    room = Room(places=PLACES, lease_s=60.0, names=(*QUICK, *SLOW), windows=windows)
    return work(room, {**SLOW, **QUICK}, UNTIL_S, dict.fromkeys(SLOW, begins_s))


def shares_in_use(worked: Worked) -> list[float]:
    """Of each 40 seconds: which part of the places' time was used."""
    used = [0.0] * int(UNTIL_S // 40)
    for (at, live), (until, _) in pairwise(worked.places):
        used[min(int(at // 40), len(used) - 1)] += live * (until - at)
    return [seconds / (40 * PLACES) for seconds in used]


@pytest.mark.parametrize("begins_s", [0.0, 5.0])
def test_slow_devices_leave_no_place_empty_behind_them(begins_s: float) -> None:
    worked = fleet(TASKS, begins_s)
    updates = [worked.updates[name] for name in QUICK]
    assert min(shares_in_use(worked)) > 0.8
    assert max(updates) - min(updates) <= 1


def test_with_a_minute_as_the_only_bound_they_did() -> None:
    assert min(shares_in_use(fleet(MINUTE, 5.0))) < 0.4


def test_no_window_is_longer_than_half_a_task() -> None:
    room = Room(places=1, names="abcdef")
    for n in range(3):  # a task takes 2 seconds, and a place is freed every 10
        assert room.is_granted("a", 10.0 * n)
        room.push("a", 10.0 * n + 2.0)
    room.ask("a", 30.0)
    latest = [refused.retry_after_s[1] for c in "bcdef" if isinstance(refused := room.ask(c, 30.0), Refused)]
    assert latest == pytest.approx([0.625, 1.0, 1.0, 1.0, 1.0])


def test_a_long_line_asks_so_often_at_most() -> None:
    names = [f"c{n}" for n in range(1001)]
    room = Room(places=1, names=names)
    for n in range(3):
        assert room.is_granted("c0", 1.0 * n)
        room.push("c0", 1.0 * n + 0.9)
    room.ask("c0", 3.0)
    for name in names[1:]:
        room.ask(name, 3.0)
    last = room.ask(names[-1], 3.5)
    assert isinstance(last, Refused)
    assert last.retry_after_s[1] == pytest.approx(1000 / ASKS_PER_S)
