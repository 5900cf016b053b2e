"""The time of events, driven by clocks that are set by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Bench

from anabranch.core import events as ev
from anabranch.core.clock import EventClock
from anabranch.core.effects import LeaseEnd

NOW, DAY_S = 1.8e9, 86400.0


class Machine:
    """A wall clock that can be set, and a monotonic one that cannot."""

    def __init__(self, wall: float = NOW, late_read_s: float = 0.0) -> None:
        self.wall, self.monotonic, self.late_read_s = wall, 77.0, late_read_s
        self.steps: list[float] = []

    def passes(self, seconds: float) -> None:
        """Time goes on."""
        self.wall += seconds
        self.monotonic += seconds

    def looks(self) -> float:
        """The monotonic clock; a look may take long."""
        self.passes(self.late_read_s)
        return self.monotonic

    def run(self, last: float) -> EventClock:
        """A run whose newest event was then."""
        return EventClock(last, lambda: self.wall, self.looks, self.steps.append)


@pytest.mark.parametrize("by_s", [-365 * DAY_S, -3600.0, -1.5, -1.0, 1.0, 1.5, 3600.0, 365 * DAY_S])
def test_time_goes_on_when_the_machines_clock_is_set(by_s: float) -> None:
    machine = Machine()
    clock = machine.run(NOW)
    machine.passes(10.0)
    assert clock.now() == pytest.approx(NOW + 10.0)
    machine.wall += by_s
    assert clock.now() == pytest.approx(NOW + 10.0)
    machine.passes(5.0)
    assert clock.now() == pytest.approx(NOW + 15.0)
    assert machine.steps == [pytest.approx(by_s)]  # and it is told once


def test_a_clock_that_is_corrected_slowly_is_no_step() -> None:
    machine = Machine()
    clock = machine.run(NOW)
    for _ in range(10_000):  # two hours and three quarters, 500 parts in a million: five seconds
        machine.passes(1.0)
        machine.wall += 0.0005
        clock.now()
    assert machine.steps == []
    assert clock.now() == pytest.approx(NOW + 10_000)


def test_a_machine_that_stands_still_between_two_looks_is_no_step() -> None:
    machine = Machine(late_read_s=60.0)
    clock = machine.run(NOW)
    clock.now()
    clock.now()
    assert machine.steps == []


@pytest.mark.parametrize(("late_read_s", "told"), [(0.0625, 1), (0.125, 0), (1.0, 0)])
def test_two_clocks_that_were_read_apart_say_nothing_of_each_other(late_read_s: float, told: int) -> None:
    machine = Machine(late_read_s=late_read_s)
    clock = machine.run(NOW)
    machine.wall += 3600.0
    clock.now()
    assert len(machine.steps) == told


@pytest.mark.parametrize("away_s", [0.0, 0.5, 1.0, 3 * DAY_S, 366 * DAY_S])
def test_a_restart_counts_the_time_away(away_s: float) -> None:
    clock = Machine(NOW + away_s).run(NOW)
    assert clock.now() == NOW + away_s
    assert (clock.away_s, clock.behind_s) == (away_s, 0.0)


def test_a_restart_on_a_clock_that_was_set_back_goes_on_from_the_last_event() -> None:
    machine = Machine(NOW - 3600.0)
    clock = machine.run(NOW)
    machine.passes(1.0)
    assert clock.now() == pytest.approx(NOW + 1.0)
    assert clock.behind_s == pytest.approx(3600.0)
    assert machine.steps == []
    machine.wall += 3600.0  # and when it is right again, that is told
    clock.now()
    assert machine.steps == [pytest.approx(3600.0)]


def test_nobody_was_away_for_longer_than_a_year() -> None:
    clock = Machine(NOW + 366 * DAY_S + 1.0).run(NOW)
    assert clock.now() == NOW
    assert clock.away_s == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 1e5), st.floats(-1e8, 1e8)), max_size=20))
def test_time_is_what_has_passed_whatever_is_done_to_the_clock(done: list[tuple[float, float]]) -> None:
    machine = Machine()
    clock, passed = machine.run(NOW), 0.0
    for seconds, step_s in done:
        machine.passes(seconds)
        machine.wall += step_s
        passed += seconds
        assert clock.now() == pytest.approx(NOW + passed, abs=1e-3)


def test_every_open_lease_begins_anew_when_the_server_is_back() -> None:
    bench = Bench(lease_s=10.0, tasks_per_client=2)
    bench.enrol("a", "b", "c")
    for client in "abc":
        bench.ask(client, f"t-{client}")
    bench.do(ev.Ticked(9.0))
    bench.do(ev.LeaseRenewed(9.0, "b", "t-b", progress=1.0))
    bench.do(ev.TaskDropped(9.0, "c", "t-c", "battery"))
    bench.do(ev.Returned(500.0))
    assert bench.do(ev.Ticked(509.0)) == []
    bench.do(ev.LeaseRenewed(509.0, "a", "t-a", progress=1.0))
    (ended,) = bench.do(ev.Ticked(510.0))
    assert (ended.task.task_id, ended.end) == ("t-b", LeaseEnd.EXPIRED)
    bench.do(ev.Returned(511.0))  # what has ended stays so
    (ended,) = bench.do(ev.Ticked(600.0))
    assert ended.task.task_id == "t-a"
