"""Two processes under one id, as lists of events: one of them works, the other waits, and it comes out."""

from __future__ import annotations

from typing import Any

import pytest
from machines import Bench

from anabranch.core import events as ev
from anabranch.core.effects import Granted, Refused
from anabranch.core.engine.admission import dropped_by
from anabranch.core.engine.sessions import SESSIONS_MAX, TWINS_S, Sessions
from anabranch.core.engine.waiting import WaitingLine
from anabranch.core.errors import StoreFull
from anabranch.core.journal import from_record, line, to_record
from anabranch.core.model.updates import Ask, Reason
from anabranch.core.snapshot import state_digest
from anabranch.host.run import Run

LEASE_S = 30.0


class Desk:
    """A server with one device, of which there may be several processes."""

    def __init__(self, **options: Any) -> None:
        self.bench, self.line = Bench("fedasync", **{"lease_s": LEASE_S, **options}), WaitingLine()
        self.bench.enrol("a")
        self.asked = 0

    def ask(self, session: str, now: float, succeeds: str = "") -> str | Refused:
        """The id of the task that a session is granted, or the refusal."""
        self.asked += 1
        ask = Ask("a", f"t{self.asked}", None, session, succeeds)
        refused = self.line.refusal(self.bench.engine, ask, now)
        if refused is not None:
            assert dropped_by(refused, now, self.bench.engine) is None
            return refused
        effects = self.bench.do(ev.TaskAsked(now, ask))
        self.line.heard(now, effects)
        assert any(isinstance(e, Granted) for e in effects)
        return ask.task_id

    def beat(self, session: str, task_id: str, now: float) -> None:
        """A heartbeat."""
        self.line.sessions.heard("a", session, now)
        self.bench.do(ev.LeaseRenewed(now, "a", task_id, now + 1.0, session))

    def push(self, task_id: str, now: float) -> None:
        """A result."""
        self.line.heard(now, self.bench.push("a", task_id, now=now))


def is_refused(answer: str | Refused) -> bool:
    return isinstance(answer, Refused) and answer.reason is Reason.ANOTHER_SESSION


def test_a_copy_waits_while_the_other_beats_and_is_told_why() -> None:
    desk = Desk()
    task = desk.ask("one", 0.0)
    assert isinstance(task, str)
    for n in range(1, 30):
        answer = desk.ask("two", 10.0 * n)
        assert isinstance(answer, Refused)
        assert answer.reason is Reason.ANOTHER_SESSION
        assert (answer.ask.client_id, answer.ask.session) == ("a", "two")
        assert answer.detail.startswith("another process runs as 'a' and has its task: stop one of them")
        assert 0 < answer.retry_after_s[0] < answer.retry_after_s[1] < LEASE_S
        desk.beat("one", task, 10.0 * n + 1.0)
    assert [t.task_id for t in desk.bench.engine.ledger.live_of("a")] == [task]
    assert desk.line.sessions.twins(300.0) == ["a"]
    assert desk.line.sessions.news == ["a"], "it is said once"


def test_a_run_that_is_over_is_over_for_a_copy_as_well() -> None:
    desk = Desk(updates_max=1)
    assert isinstance(desk.ask("one", 0.0), str)
    assert is_refused(desk.ask("two", 1.0))
    desk.bench.enrol("b")
    desk.bench.work("b", "the last", now=2.0)
    answer = desk.ask("two", 3.0)
    assert isinstance(answer, Refused)
    assert (answer.reason, answer.final) == (Reason.RUN_FINISHED, True)


def test_a_copy_takes_over_from_one_that_has_fallen_silent() -> None:
    desk = Desk()
    task = desk.ask("one", 0.0)
    assert isinstance(task, str)
    desk.beat("one", task, 10.0)
    assert is_refused(desk.ask("two", 10.0 + LEASE_S / 2 - 0.1))
    assert desk.ask("two", 10.0 + LEASE_S / 2) == "t3"
    assert desk.line.sessions.twins(30.0) == [], "they may as well have been one after the other"


def test_it_takes_over_when_the_lease_has_ended_or_the_result_is_there() -> None:
    desk = Desk()
    first = desk.ask("one", 0.0)
    assert isinstance(first, str)
    desk.push(first, 1.0)
    second = desk.ask("two", 1.0)
    assert second == "t2"
    desk.bench.tick(100.0)
    assert desk.ask("one", 100.0) == "t3"


def test_a_restart_goes_on_at_once() -> None:
    desk, session = Desk(), "life-0"
    assert desk.ask(session, 0.0) == "t1"
    for life in range(1, 6):
        before, session = session, f"life-{life}"
        assert desk.ask(session, float(life), succeeds=before) == f"t{life + 1}"
    assert desk.line.sessions.twins(6.0) == []


def test_two_that_both_come_after_the_same_one() -> None:
    desk = Desk()
    assert desk.ask("one", 0.0, succeeds="before") == "t1"
    assert is_refused(desk.ask("copy", 1.0, succeeds="before"))


def test_a_copy_of_a_folder_in_use_takes_over_once_and_no_more() -> None:
    desk = Desk()
    task = desk.ask("one", 0.0)
    assert isinstance(task, str)
    assert desk.ask("copy", 1.0, succeeds="one") == "t2", "just as a restart would look"
    desk.beat("one", task, 2.0)
    assert desk.line.sessions.twins(2.0) == ["a"], "but the one before it still lives"
    assert is_refused(desk.ask("one", 3.0))
    desk.beat("copy", "t2", 4.0)
    for n in range(20):
        assert is_refused(desk.ask("one", 5.0 + 4.0 * n))
        desk.beat("copy", "t2", 6.0 + 4.0 * n)


@pytest.mark.parametrize("comes_to", ["a task", "a refusal", "nothing"])
def test_two_that_ask_in_one_batch_are_told_apart_before_either_has_a_task(comes_to: str) -> None:
    desk = Desk()
    line, engine = desk.line, desk.bench.engine
    one = Ask("a", "of-one", None, "one")
    assert line.refusal(engine, one, 0.0) is None
    assert is_refused(desk.ask("two", 0.0)), "the server looks at a whole batch before it applies any of it"
    if comes_to == "a task":
        line.heard(0.0, desk.bench.do(ev.TaskAsked(0.0, one)))
        assert is_refused(desk.ask("two", 1.0))
        desk.push(one.task_id, 2.0)
    elif comes_to == "a refusal":
        line.heard(0.0, [Refused(one, Reason.AT_CAPACITY, "", (0.5, 2.0))])
    assert is_refused(desk.ask("two", 2.0)) is (comes_to == "nothing")
    assert is_refused(desk.ask("two", LEASE_S / 2)) is False


def test_an_ask_that_could_not_be_written_makes_nobody_the_owner() -> None:
    desk = Desk()
    run = Run(desk.bench.engine, desk.line)
    asked = [Ask("a", "of-one", None, "one"), Ask("a", "of-copy", None, "copy", succeeds="one")]

    def full(_: ev.Event) -> None:
        raise StoreFull("no space left")

    run.take(ev.TaskAsked(0.0, asked[0]))
    with pytest.raises(StoreFull):
        run.take(ev.TaskAsked(1.0, asked[1]), full)
    run.take(ev.LeaseRenewed(2.0, "a", "of-one", 3.0, "one"))
    (answer,) = run.take(ev.TaskAsked(3.0, asked[1])).effects
    assert isinstance(answer, Refused)
    assert is_refused(answer), "one has the task, and lives"
    assert [t.task_id for t in desk.bench.engine.ledger.live_of("a")] == ["of-one"]
    again = Ask("a", "of-one-2", None, "one")
    assert isinstance(run.take(ev.TaskAsked(4.0, again)).effects[-1], Granted), "it may give its task up"


def test_one_that_could_not_be_written_keeps_nobody_waiting() -> None:
    desk = Desk()
    run = Run(desk.bench.engine, desk.line)
    asks = [ev.TaskAsked(float(n), Ask("a", f"t{n}", None, session)) for n, session in enumerate("xyy")]
    run.begin(asks[:2])
    assert [run.settle(event).event is not None for event in asks[:2]] == [True, False]
    run.begin(asks[2:])  # the disk was full
    assert run.settle(asks[2]).event is not None


def test_a_copy_that_is_started_over_and_over_again_takes_nothing() -> None:
    desk = Desk()
    task = desk.ask("one", 0.0)
    assert isinstance(task, str)
    for n in range(1, 30):
        assert is_refused(desk.ask(f"copy-life-{n}", float(n), succeeds=f"copy-life-{n - 1}")), n
        if n % 10 == 0:
            desk.beat("one", task, n + 0.5)
    assert desk.line.sessions.twins(30.0) == ["a"]


def test_two_that_wait_for_one_that_is_gone_are_both_remembered() -> None:
    desk = Desk()
    assert desk.ask("gone", 0.0) == "t1"
    assert is_refused(desk.ask("one", 1.0))
    assert is_refused(desk.ask("copy", 2.0, succeeds="one"))
    desk.bench.tick(100.0)
    assert desk.ask("one", 100.0) == "t4"
    desk.beat("one", "t4", 101.0)
    assert is_refused(desk.ask("copy", 102.0, succeeds="one")), "it asked before, so it is no restart"


def test_one_that_was_asleep_does_not_take_over_as_a_restart_does() -> None:
    desk = Desk()
    assert desk.ask("one", 0.0) == "t1"
    assert desk.ask("copy", 1.0, succeeds="one") == "t2"
    assert desk.ask("one", 1.0 + LEASE_S) == "t3"
    assert is_refused(desk.ask("copy", 2.0 + LEASE_S, succeeds="one"))


def test_who_names_no_session_is_taken_as_it_comes() -> None:
    desk = Desk()
    assert desk.ask("", 0.0) == "t1"
    assert desk.ask("", 1.0) == "t2"
    assert desk.ask("one", 2.0) == "t3"
    assert desk.ask("", 3.0) == "t4"
    assert desk.ask("two", 4.0) == "t5"
    assert desk.line.sessions.twins(5.0) == []


def test_that_there_were_two_is_forgotten_in_the_end() -> None:
    desk = Desk()
    task = desk.ask("one", 0.0)
    assert isinstance(task, str)
    desk.ask("two", 1.0)
    desk.beat("one", task, 2.0)
    assert desk.line.sessions.twins(2.0 + TWINS_S) == ["a"]
    assert desk.line.sessions.twins(2.1 + TWINS_S) == []


def test_what_is_kept_is_bounded() -> None:
    sessions = Sessions(kept_max=10)
    for n in range(100):
        for session in range(5):
            sessions.heard(f"device-{n}", f"s{session}", float(n))
    assert len(sessions._devices) == 10
    assert all(len(device.sessions) == SESSIONS_MAX for device in sessions._devices.values())


def no_values(*_: object) -> Any:
    raise AssertionError("no update, no values")


@pytest.mark.parametrize(
    "event",
    [
        ev.TaskAsked(1.0, Ask("a", "t", 3, "session", "before")),
        ev.LeaseRenewed(1.0, "a", "t", 2.0, "session"),
    ],
)
def test_the_log_has_nothing_of_it(event: ev.Event) -> None:
    record = to_record(event)
    assert "session" not in line(record)
    assert from_record(record, Bench().engine.spec, no_values) == event


def test_a_refusal_changes_nothing() -> None:
    desk = Desk()
    desk.ask("one", 0.0)
    before = state_digest(desk.bench.engine)
    assert is_refused(desk.ask("two", 1.0))
    assert state_digest(desk.bench.engine) == before
