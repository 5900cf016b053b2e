"""How soon a waiting device comes back: quick and slow devices keep the places in use, each in its turn."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import Room, Worked, work

from anabranch.core.config.ranges import MINUTE, PLACES, TASKS
from anabranch.core.effects import Refused
from anabranch.core.engine.pace import ASKS_PER_S, PACE_S_MIN
from anabranch.core.engine.strategy import Context, Refusal
from anabranch.core.model.updates import Ask
from anabranch.strategies.teasq import Teasq

SLOTS, UNTIL_S = 8, 200.0
QUICK, SLOW = {f"quick-{n}": 1.0 for n in range(100)}, {f"slow-{n}": 15.0 for n in range(10)}


def fleet(windows: str, begins_s: float) -> Worked:
    """What a hundred quick devices and ten slow ones come to."""
    room = Room(places=SLOTS, lease_s=60.0, names=(*QUICK, *SLOW), windows=windows)
    return work(room, {**SLOW, **QUICK}, UNTIL_S, dict.fromkeys(SLOW, begins_s))


def shares_in_use(worked: Worked) -> list[float]:
    """Of each 40 seconds: which part of the places' time was used."""
    used = [0.0] * int(UNTIL_S // 40)
    for (at, live), (until, _) in pairwise(worked.places):
        used[min(int(at // 40), len(used) - 1)] += live * (until - at)
    return [seconds / (40 * SLOTS) for seconds in used]


@pytest.mark.parametrize("windows", [PLACES, TASKS])
@pytest.mark.parametrize("begins_s", [0.0, 5.0])
def test_slow_devices_leave_no_place_empty_behind_them(begins_s: float, windows: str) -> None:
    worked = fleet(windows, begins_s)
    updates = [worked.updates[name] for name in QUICK]
    assert min(shares_in_use(worked)) > 0.8
    assert max(updates) - min(updates) <= 1


def test_with_a_minute_as_the_only_bound_they_did() -> None:
    assert min(shares_in_use(fleet(MINUTE, 5.0))) < 0.4


def latest_s(room: Room, names: str, now: float) -> list[float]:
    """The latest moments at which these devices are told to come back; the earliest is half of each."""
    told = [refused.retry_after_s for name in names if isinstance(refused := room.ask(name, now), Refused)]
    assert [earliest_s for earliest_s, _ in told] == pytest.approx([latest / 2 for _, latest in told])
    return [latest for _, latest in told]


@pytest.mark.parametrize(("windows", "first_s"), [(TASKS, 0.625), (PLACES, 1.0)])
def test_no_window_is_longer_than_half_a_task(windows: str, first_s: float) -> None:
    room = Room(places=1, names="abcdef", windows=windows)
    for n in range(3):  # a task takes 2 seconds, and a place is freed every 10
        assert room.is_granted("a", 10.0 * n)
        room.push("a", 10.0 * n + 2.0)
    room.ask("a", 30.0)
    assert latest_s(room, "bcdef", 30.0) == pytest.approx([first_s, 1.0, 1.0, 1.0, 1.0])


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


def mean(values: list[float]) -> float:
    """As older releases had it: the newest is a tenth of it."""
    found = values[0]
    for value in values:
        found = (1 - 0.1) * found + 0.1 * value
    return found


def called_together(windows: str = PLACES, **options: Any) -> Room:
    """Three devices have had the three places from 0 to 12; a and b have theirs again since, c since 15."""
    room = Room(**{"places": 3, "names": "abcdefgh", "windows": windows, **options})
    for name in "abc":
        assert room.is_granted(name, 0.0)
    for name in "abc":
        room.push(name, 12.0)
    for name, now in (("a", 12.0), ("b", 12.0), ("c", 15.0)):
        assert room.is_granted(name, now)
    return room


def test_who_waits_comes_back_when_the_tasks_that_hold_the_places_can_end() -> None:
    """These at 24, 24 and 27, and those after them 12 seconds from now; half of what is left is told."""
    assert latest_s(called_together(), "defgh", 16.0) == pytest.approx([4.0, 4.0, 5.5, 6.0, 6.0])


def test_by_the_pace_alone_all_would_ask_again_at_once() -> None:
    assert latest_s(called_together(TASKS), "defgh", 16.0) == [PACE_S_MIN] * 5


def test_a_place_that_is_free_for_another_is_not_waited_for_twice() -> None:
    """It is d's, and the one that ends next at 24 is e's."""
    room = called_together()
    latest_s(room, "d", 16.0)
    room.push("c", 16.25)
    assert latest_s(room, "ef", 16.5)[0] == pytest.approx((12.0 + QUICK_S - 16.5) / 2)


H_S = 0.9 * 12.0 + 0.1 * 1.25  # the tasks have taken 12, 12, 12 and 1.25 seconds
QUICK_S = H_S - 2 * 0.1 * (H_S - 1.25)


def test_the_next_place_is_overdue_where_tasks_take_longer_than_they_did() -> None:
    """Since 24; a sixteenth of that is as if so much were left, and half of it the latest moment."""
    room = called_together()
    assert latest_s(room, "d", 24.0 + 64.0) == pytest.approx([2.0])
    assert latest_s(called_together(TASKS), "d", 24.0 + 64.0) == [PACE_S_MIN]


def test_before_anything_is_known_of_tasks_those_who_wait_ask_ever_more_seldom() -> None:
    room, older = (Room(places=1, windows=windows, lease_s=9000.0) for windows in (PLACES, TASKS))
    for each in (room, older):
        assert each.is_granted("a", 0.0)
    told = {1.0: (0.5, 2.0), 64.0: (0.5, 2.0), 96.0: (1.5, 3.0), 640.0: (10.0, 20.0), 8000.0: (30.0, 60.0)}
    for now, window_s in told.items():
        refused, before = room.ask("b", now), older.ask("b", now)
        assert isinstance(refused, Refused)
        assert isinstance(before, Refused)
        assert refused.retry_after_s == pytest.approx(window_s)
        assert before.retry_after_s == (0.5, 2.0)


def test_windows_of_the_settings_may_be_shorter_than_any_of_the_pace_until_that_is_known() -> None:
    room = Room(places=1, retry_after_s=(0.01, 0.02))
    assert room.is_granted("a", 0.0)
    assert latest_s(room, "b", 0.5) == [0.02]
    assert latest_s(room, "b", 0.96) == [PACE_S_MIN], "nothing has come for 32 times as long, and more"
    assert latest_s(room, "b", 6.4) == [0.2]


@pytest.mark.parametrize("hours", [1, 100])
def test_after_hours_without_devices_nobody_is_sent_away_for_longer_than_half_a_task(hours: int) -> None:
    room, now = called_together(), 3600.0 * hours
    while (ends_at := room.bench.engine.next_deadline()) is not None:  # leases of 36 seconds
        room.tick(ends_at)
    for name in "abc":
        assert room.is_granted(name, now)
    half_a_task_s = 0.5 * mean([12.0, 12.0, 12.0, 36.0, 36.0, 36.0])
    assert max(latest_s(room, "defgh", now)) <= half_a_task_s < 10.0
    for name in "abc":
        room.push(name, now + 12.0)
    assert room.is_granted("d", now + 12.0)


def test_leases_that_end_say_nothing_of_what_tasks_take() -> None:
    room = Room(places=2, names="abcde", lease_s=16.0)
    for name in "ab":
        assert room.is_granted(name, 0.0)
    room.tick(16.0)
    assert not room.tasks
    for name in "cd":
        assert room.is_granted(name, 16.0)
    assert latest_s(room, "e", 16.5) == [PACE_S_MIN]


@pytest.mark.parametrize("places", [0, 7])
def test_a_cap_of_a_strategy_s_own_is_as_good_as_one_of_the_settings(places: int) -> None:
    told = latest_s(called_together(), "defgh", 16.0)
    capped = called_together(places=places, strategy="teasq", cap=3, kept=1.0, bits=32, cache_size=9)
    assert latest_s(capped, "defgh", 16.0) == pytest.approx(told)
    scheduler = {"name": "capped", "fraction": 0.375, "least": 1}
    scheduled = called_together(places=places, buffer_size=9, scheduler=scheduler)
    assert latest_s(scheduled, "defgh", 16.0) == pytest.approx(told)


class Reticent(Teasq):
    """Of others: it says nothing of how many places there are."""

    def admit(self, state: Any, ask: Ask, context: Context) -> Refusal | None:
        found = super().admit(state, ask, context)
        return found and Refusal(found.reason, found.detail)


def test_a_cap_of_which_nobody_knows_says_not_whose_place_is_next_but_what_is_overdue() -> None:
    room = Room(places=0, strategy="teasq", cap=1, kept=1.0, bits=32)
    room.bench.engine.strategy = Reticent(cap=1, kept=1.0, bits=32)
    for n in range(2):
        assert room.is_granted("a", 8.0 * n)
        room.push("a", 8.0 * n + 8.0)
    assert room.is_granted("a", 16.0)
    assert latest_s(room, "b", 16.0) == pytest.approx([0.5])  # an eighth of 8 seconds
    assert latest_s(room, "b", 16.0 + 48.0) == pytest.approx([1.5])


@settings(max_examples=100)
@given(
    st.sampled_from([TASKS, MINUTE]),
    st.lists(st.tuples(st.floats(0.0, 300.0), st.floats(0.0, 300.0)), min_size=2, max_size=12),
)
def test_the_windows_of_older_releases_are_what_they_were_to_the_bit(
    windows: str, tasks: list[tuple[float, float]]
) -> None:
    room, now, freed, held = Room(windows=windows, lease_s=9000.0), 0.0, list[float](), list[float]()
    for pause_s, task_s in tasks:
        granted_at = now + pause_s
        assert room.is_granted("a", granted_at)
        now = granted_at + task_s
        room.push("a", now)
        freed.append(now)
        held.append(now - granted_at)
    assert room.is_granted("a", now)
    interval_s = mean([after - before for before, after in pairwise(freed)])
    for ahead, name in enumerate("bcdef"):
        most_s = 60.0 if windows == MINUTE else max(0.5 * mean(held), ahead / 100.0)
        latest = min(max(min(0.5 * ((ahead + 0.125) * interval_s), most_s), 0.05), 60.0)
        assert isinstance(refused := room.ask(name, now), Refused)
        assert refused.retry_after_s == (latest / 2.0, latest)
