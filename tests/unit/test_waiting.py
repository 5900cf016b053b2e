"""The waiting line as lists of events: who waits longest goes first, and nobody is waited for in vain."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_lists import lists_up_to
from rooms import Room

from anabranch.core.effects import Refused
from anabranch.core.engine.pace import PACE_S_MAX, PACE_S_MIN
from anabranch.core.engine.waiting import GRACE_S, KEPT_S
from anabranch.core.model.updates import Ask, Reason
from anabranch.core.snapshot import state_digest

NAMES = tuple("abcdef")


def test_who_has_waited_goes_before_who_has_just_pushed() -> None:
    room = Room()
    assert room.is_granted("a", 0.0)
    assert not room.is_granted("b", 1.0)
    room.push("a", 2.0)
    refused = room.ask("a", 2.0)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.detail) == (
        Reason.AT_CAPACITY,
        "devices that have waited longer for a place: 1",
    )
    assert room.is_granted("b", 2.5)
    room.push("b", 3.0)
    assert not room.is_granted("b", 3.0)
    assert room.is_granted("a", 3.1)


def test_places_enough_for_all_who_wait_leave_one_for_the_next() -> None:
    room = Room(places=2)
    assert room.is_granted("a", 0.0)
    assert room.is_granted("b", 0.0)
    assert not room.is_granted("c", 0.0)
    room.push("a", 1.0)
    room.push("b", 1.0)
    assert room.is_granted("a", 1.0)
    assert not room.is_granted("b", 1.0)
    assert room.is_granted("c", 1.1)


def test_a_device_that_does_not_come_back_is_not_waited_for() -> None:
    room = Room()
    room.ask("a", 0.0)
    refused = room.ask("b", 1.0)
    assert isinstance(refused, Refused)
    room.push("a", 2.0)
    awaited_until = 1.0 + refused.retry_after_s[1] + GRACE_S
    assert not room.is_granted("a", awaited_until)
    assert room.is_granted("a", awaited_until + 0.01)


def test_a_device_that_comes_late_has_its_old_turn() -> None:
    room = Room()
    room.ask("a", 0.0)
    room.ask("b", 1.0)
    room.ask("c", 4.0)
    room.ask("b", 5.0)  # it was due at 3.5
    room.push("a", 5.5)
    assert not room.is_granted("c", 5.6)
    assert room.is_granted("b", 5.7)


def test_a_device_that_comes_much_too_late_goes_to_the_end() -> None:
    room = Room()
    room.ask("a", 0.0)
    refused = room.ask("b", 1.0)
    assert isinstance(refused, Refused)
    late = 1.0 + refused.retry_after_s[1] + GRACE_S + KEPT_S + 0.1
    room.ask("c", late - 0.5)
    room.ask("b", late)
    room.push("a", late)
    assert not room.is_granted("b", late + 0.1)
    assert room.is_granted("c", late + 0.2)
    assert len(room.line) == 1


def test_the_engine_learns_nothing_of_those_who_wait() -> None:
    room = Room()
    room.ask("a", 0.0)
    before = state_digest(room.bench.engine)
    for client in "bcdef":
        assert not room.is_granted(client, 1.0)
    assert state_digest(room.bench.engine) == before
    assert len(room.line) == 5


def test_a_device_that_asks_anew_keeps_its_place_only_where_nobody_waits_for_it() -> None:
    room = Room()
    room.ask("a", 0.0)
    assert room.is_granted("a", 1.0), "nobody waits"
    assert not room.is_granted("b", 2.0)
    assert not room.is_granted("a", 3.0), "b waits"
    assert room.is_granted("b", 3.1)
    assert room.bench.engine.ledger.live_of("a") == []


def test_the_line_is_bounded() -> None:
    room = Room(waiting_max=2)
    room.ask("a", 0.0)
    for n in range(200):
        for client in "bcdef":
            room.ask(client, 1.0 + 0.001 * n)
            assert len(room.line._ends) <= 4
    assert len(room.line) == 2
    room.push("a", 2.0)
    assert not room.is_granted("d", 2.0)
    assert room.is_granted("b", 2.1)


def test_one_that_asks_without_end_does_not_change_until_when_the_others_are_awaited() -> None:
    """Ends of waits that no longer count are cleared away meanwhile."""
    for asks in (1, 9):
        room = Room(waiting_max=3)
        room.ask("a", 0.0)
        for client in "bcd":
            room.ask(client, 0.0)
        c_until = room.line._waiters["c"].until
        for n in range(asks):
            room.ask("b", 1.0 + 0.1 * n)
        room.ask("d", 1.9)
        room.push("a", 2.0)
        assert room.is_granted("b", 2.0)
        room.push("b", 2.1)
        assert not room.is_granted("d", c_until), "c was there before it"
        assert room.is_granted("d", c_until + 0.01), "c is not there"
        assert len(room.line) == 1
        room.ask("e", c_until + KEPT_S + 0.1)
        assert list(room.line._waiters) == ["e"], "c has lost its turn"


def test_the_ids_of_the_newest_tasks_that_came_to_nothing_are_used_up() -> None:
    """However they ended; nobody else's ask is refused for that, and an ask in hand is not."""
    room = Room(places=4, ended_max=3, lease_s=10.0)
    room.ask("a", 0.0)  # t1, whose lease runs out
    room.tick(20.0)
    room.ask("b", 21.0)  # t2
    room.ask("b", 22.0)  # t3, for which t2 is given up
    room.ask("c", 23.0)  # t4
    room.drop("c", 23.0)
    room.ask("a", 24.0)  # t5, for which the engine forgets t1

    def answer(client: str, task_id: str) -> Reason | None:
        refused = room.line.refusal(room.bench.engine, Ask(client, task_id), 25.0)
        return None if refused is None else refused.reason

    used = [("a", "t1"), ("b", "t2"), ("c", "t4")]
    assert {answer(*one) for one in used} == {Reason.DUPLICATE_TASK}
    assert [answer("b", "t3"), answer("d", "t1")] == [None, None]
    room.drop("b", 25.0)
    assert [answer("a", "t1"), answer("b", "t2"), answer("b", "t3")] == [None, *[Reason.DUPLICATE_TASK] * 2]


def test_without_a_line_who_comes_first_is_served() -> None:
    room = Room(waiting_max=0)
    room.ask("a", 0.0)
    refused = room.ask("b", 1.0)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == (0.5, 2.0)
    room.push("a", 2.0)
    assert room.is_granted("a", 2.0)


def test_the_window_follows_the_pace_and_the_turn() -> None:
    room = Room(places=1)
    now = 0.0
    for _ in range(3):  # a place every 8 seconds
        assert room.is_granted("a", now)
        now += 8.0
        room.push("a", now)
    room.ask("a", now)
    now += 8.0
    windows = []
    for client in "bcdef":
        refused = room.ask(client, now)
        assert isinstance(refused, Refused)
        windows.append(refused.retry_after_s)
    assert windows[0] == pytest.approx((0.25, 0.5))
    assert windows[1] == pytest.approx((2.0, 4.0)), "half a task"
    assert windows == sorted(windows)
    assert all(PACE_S_MIN <= latest_s <= PACE_S_MAX for _, latest_s in windows)


def test_nobody_is_told_to_stay_away_for_longer_than_a_minute() -> None:
    room = Room(lease_s=5000.0)
    for n in range(3):  # a place every 1,000 seconds
        assert room.is_granted("a", 1000.0 * n)
        room.push("a", 1000.0 * n + 999.0)
    room.ask("a", 3000.0)
    room.ask("b", 3000.0)
    refused = room.ask("c", 3000.0)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == (30.0, 60.0)


def test_who_has_had_its_turn_keeps_no_place_from_a_device_that_has_lapsed() -> None:
    room = Room(lease_s=100.0)
    assert room.is_granted("a", 0.0)
    assert not room.is_granted("b", 1.0)
    room.drop("a", 2.0)
    assert room.is_granted("b", 2.5)
    room.push("b", 3.0)
    assert room.is_granted("a", 3.1)
    room.drop("a", 3.5)
    assert room.is_granted("a", 4.0), "nobody waits any more"


def test_another_reason_is_not_a_turn() -> None:
    room = Room()
    room.ask("a", 0.0)
    room.ask("b", 1.0)
    room.bench.engine.paused = True
    refused = room.ask("b", 2.0)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.retry_after_s, len(room.line)) == (Reason.PAUSED, (0.5, 2.0), 0)


def test_the_cap_of_a_strategy_has_the_same_line() -> None:
    room = Room(places=0, strategy="teasq", cap=1, kept=1.0, bits=32)
    assert room.is_granted("a", 0.0)
    assert not room.is_granted("b", 1.0)
    room.push("a", 2.0)
    refused = room.ask("a", 2.0)
    assert isinstance(refused, Refused)
    assert refused.detail == "devices that have waited longer for a place: 1"
    assert room.is_granted("b", 2.5)


@settings(max_examples=200)
@given(
    st.integers(1, 4),
    lists_up_to(
        50, st.tuples(st.sampled_from(NAMES), st.booleans(), st.sampled_from([0.0, 0.1, 1.0, 9.0, 64.0]))
    ),
)
def test_whatever_they_do_the_first_in_the_line_gets_the_next_place(
    places: int, steps: list[tuple[str, bool, float]]
) -> None:
    room, now = Room(places), 0.0
    until: dict[str, float] = {}  # when each that waits should be back: who was refused first is first
    for client, pushes, wait_s in steps:
        now += wait_s
        if client in room.tasks:
            if pushes:
                room.push(client, now)
            continue
        until = {name: back for name, back in until.items() if back + KEPT_S >= now}
        before = takewhile(lambda name, its=client: name != its, until)  # type: ignore[misc]
        ahead = sum(until[name] >= now for name in before)
        free = places - len(room.tasks)
        answer = room.ask(client, now)
        assert isinstance(answer, Refused) == (free <= ahead)
        if isinstance(answer, Refused):
            until[client] = now + answer.retry_after_s[1] + GRACE_S
        else:
            until.pop(client, None)
        assert len(room.line) == len(until)
