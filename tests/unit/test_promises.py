"""What devices whose tasks came to nothing are promised, by lists of what they were told."""

from __future__ import annotations

from anabranch.core.effects import Granted, LeaseEnd, LeaseEnded
from anabranch.core.model.updates import LocalPlan, Task
from anabranch.simulation.promises import LIVE_WITHIN_S, Turns

LEASE_S, LIVE = 20.0, 16  # of as many places two are shared
QUIET_S = 60.0  # until then everything goes wrong


def task(client: str) -> Task:
    return Task("t", client, 0, 0.0, LEASE_S, LEASE_S, 1, LocalPlan())


def lapsed(*clients: str, times: int = 2) -> Turns:
    """So many tasks in a row of each came to nothing, the last as quiet begins."""
    turns = Turns()
    for client in clients * times:
        turns.observe([LeaseEnded(task(client), LeaseEnd.EXPIRED)], QUIET_S)
    return turns


def test_who_lapsed_once_or_never_should_have_a_task_in_time() -> None:
    turns = lapsed("a", times=1)
    for client in "ab":
        assert turns.is_due(client, QUIET_S + LIVE_WITHIN_S, LIVE)


def test_who_lapsed_again_may_wait_until_the_server_forgets() -> None:
    turns = lapsed("a")
    assert not turns.is_due("a", QUIET_S + LIVE_WITHIN_S, LIVE)
    turns.forget()
    assert turns.is_due("a", QUIET_S + LIVE_WITHIN_S, LIVE)


def test_a_round_that_ends_is_no_lapse() -> None:
    turns = Turns()
    for _ in range(2):
        turns.observe([LeaseEnded(task("a"), LeaseEnd.CANCELLED)], QUIET_S)
    assert turns.is_due("a", QUIET_S + LIVE_WITHIN_S, LIVE)


def passed_over(*, late: bool = False, sooner: bool = False) -> bool:
    """Whether a should have had a task when b and c had theirs; it comes too late, or after them."""
    turns, now = lapsed("a", "b", "c"), QUIET_S + LEASE_S
    turns.refused("a", now + (2.0 if sooner else 0.0), 1.0)
    turns.refused("b", now + 1.0, 2.0)
    turns.refused("c", now + 1.0, 2.0)
    at = now + (9.0 if late else 1.4 if not sooner else 2.5)
    for client in "bc":
        turns.observe([Granted(task(client))], at)
    return turns.is_due("a", QUIET_S + LIVE_WITHIN_S, LIVE)


def test_nobody_of_its_kind_goes_before_who_came_first() -> None:
    assert passed_over()
    assert not passed_over(late=True)
    assert not passed_over(sooner=True)


def test_what_comes_before_its_wait_is_over_is_no_turn() -> None:
    turns = lapsed("a", "b", "c")
    turns.refused("a", QUIET_S + LEASE_S - 1.0, 60.0)
    for client in "bc":
        turns.observe([Granted(task(client))], QUIET_S + LEASE_S + 1.0)
    assert not turns.is_due("a", QUIET_S + LIVE_WITHIN_S, LIVE)


def test_the_line_of_those_who_lapsed_again_goes_on() -> None:
    turns, now = lapsed("a", "b"), QUIET_S + LEASE_S
    turns.refused("a", now, 1.0)
    turns.observe([Granted(task("b"))], now)
    assert not turns.is_due("a", now + LIVE_WITHIN_S - 1.0, LIVE)
    assert not turns.is_due("a", now + LIVE_WITHIN_S, LIVE)
    assert turns.is_due("a", now + LIVE_WITHIN_S + 1.0, LIVE), "nobody of its kind had one for so long"
