"""What messages come to before the log and after it, in batches; the drivers' suite has the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from machines import Bench

from anabranch.core import events as ev
from anabranch.core.effects import Decided, Granted, LeaseEnd, LeaseEnded, Refused
from anabranch.core.engine.waiting import WaitingLine
from anabranch.core.errors import IdTaken, Overloaded
from anabranch.core.limits import Limits
from anabranch.core.model.updates import Ask, Capability, Decision, Reason, Receipt, Verdict
from anabranch.core.snapshot import state_digest
from anabranch.host.run import Advice, AdviceKind, NoLine, Run, Settlement, advice


class Desk(Bench):
    """A run with two devices, of which `a` has the task `t-a`; updates are made by `arrived`."""

    def __init__(self, old: Callable[[str], Receipt | None] = lambda _: None, **options: Any) -> None:
        super().__init__("fedasync", **options)
        self.run = Run(self.engine, WaitingLine(), Limits(capabilities_per_hour=1), old)
        self.enrol("a", "b")
        self.ask("a", "t-a")

    def arrived(self, update_id: str, task_id: str = "t-a", sha256: str = "00" * 32) -> ev.UpdateArrived:
        other = Bench("fedasync")
        other.push("a", task_id, update_id=update_id)
        (event,) = other.log
        assert isinstance(event, ev.UpdateArrived)
        return ev.UpdateArrived(1.0, event.update, ev.Payload(sha256, 16))

    def settled(self, *events: ev.Event) -> list[Settlement]:
        """A batch; settling it changes nothing of the engine."""
        before = state_digest(self.engine)
        self.run.begin(events)
        found = [self.run.settle(event) for event in events]
        assert state_digest(self.engine) == before
        return found


def ask(client_id: str, task_id: str, now: float = 1.0) -> ev.TaskAsked:
    return ev.TaskAsked(now, Ask(client_id, task_id))


def test_a_batch_is_settled_before_any_of_it_is_applied() -> None:
    desk = Desk(concurrency=1)
    update, refused = desk.settled(desk.arrived("u-1"), ask("b", "t-b"))
    assert update.event is not None
    assert refused.event is None, "the place is not free yet"
    assert [e.reason for e in refused.effects if isinstance(e, Refused)] == [Reason.AT_CAPACITY]
    assert any(isinstance(e, Decided) for e in desk.run.apply(update))
    (granted,) = desk.settled(ask("b", "t-b2", 2.0))
    assert isinstance(desk.run.apply(granted)[-1], Granted)


def test_the_state_is_not_looked_at_again_for_an_update_that_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be large, and a device can have as many refused as it likes."""
    desk, looks = Desk(), list[int]()
    monkeypatch.setattr(
        "anabranch.host.run.check_kept", lambda *_: looks.append(desk.engine.counters.applied)
    )
    for number in range(4):  # but for the first they are of a task that has its answer
        desk.run.apply(desk.settled(desk.arrived(f"u-{number}"))[0])
    assert (desk.engine.counters.applied, desk.engine.counters.rejected) == (1, 3)
    assert looks == [1]


def test_who_asks_anew_in_vain_gives_its_task_up_unless_its_update_is_in_the_batch() -> None:
    desk = Desk(concurrency=1)
    desk.settled(ask("b", "t-b"))
    asked, _ = desk.settled(ask("a", "t-2"), desk.arrived("u-1"))
    assert asked.event is None
    (asked,) = desk.settled(ask("a", "t-3"))
    assert isinstance(asked.event, ev.TaskDropped)
    lost, refused = desk.run.apply(asked)
    assert isinstance(lost, LeaseEnded)
    assert lost.end is LeaseEnd.DROPPED
    assert isinstance(refused, Refused)


def test_one_of_the_heartbeats_in_a_batch_is_for_the_log() -> None:
    desk = Desk(lease_s=60.0)
    beats = [ev.LeaseRenewed(30.0, "a", "t-a", progress) for progress in (0.0, 1.0, 2.0)]
    assert [found.event for found in desk.settled(*beats)] == [None, beats[1], None]
    assert desk.settled(beats[2])[0].event == beats[2]


@pytest.mark.parametrize(("now", "is_logged"), [(36.0, True), (35.9, False)])
def test_a_trifle_of_a_lease_is_not_renewed(now: float, is_logged: bool) -> None:
    desk = Desk(lease_s=60.0)
    desk.run.apply(desk.settled(ev.LeaseRenewed(30.0, "a", "t-a", 1.0))[0])
    assert (desk.settled(ev.LeaseRenewed(now, "a", "t-a", 2.0))[0].event is not None) is is_logged


def test_a_message_by_itself_is_logged_before_it_is_applied() -> None:
    desk, versions = Desk(), []
    done = desk.run.take(desk.arrived("u-1"), lambda _: versions.append(desk.engine.version))
    assert (versions, desk.engine.version) == ([0], 1)
    assert isinstance(done.event, ev.UpdateArrived)
    for times in (1, 2):
        again = desk.run.take(desk.arrived("u-1"), lambda _: versions.append(-1))
        assert (again.event, versions, desk.run.duplicates) == (None, [0], times)
    with pytest.raises(IdTaken, match="an id is used once"):
        desk.run.take(desk.arrived("u-1", sha256="11" * 32))


def test_an_update_of_long_ago_is_answered_from_the_log() -> None:
    told = Receipt("u-0", "t-0", 3, Decision(Verdict.PUBLISHED), "a", "00" * 32)
    desk = Desk(lambda update_id: told if update_id == "u-0" else None)
    (effect,) = desk.run.repeat(desk.arrived("u-0", "t-0")).effects
    assert isinstance(effect, Decided)
    assert (effect.duplicate, effect.receipt) == (True, told)
    assert isinstance(desk.run.repeat(desk.arrived("u-0", "t-1")).error, IdTaken)


def test_another_capability_is_news_but_not_without_end() -> None:
    desk = Desk()
    said = [desk.settled(ev.Enrolled(1.0, "a", Capability(examples=n)))[0] for n in (0, 1, 2)]
    assert [found.event is not None for found in said] == [False, True, False]
    assert said[0].error is None
    assert isinstance(said[2].error, Overloaded)


def test_without_a_line_nobody_waits() -> None:
    desk = Desk(concurrency=1)
    desk.run.line = NoLine()
    for now in (1.0, 2.0):
        assert desk.settled(ask("b", "t-b", now))[0].event is None
    desk.run.apply(desk.settled(desk.arrived("u-1"))[0])
    desk.run.apply(desk.settled(ask("a", "t-2", 3.0))[0])
    assert "t-2" in desk.engine.ledger.tasks


def test_advice() -> None:
    desk = Desk(lease_s=60.0, upload_now_versions=2, versions_max=4)
    assert advice(desk.engine, "a", "t-a") == Advice(60.0, 0)
    assert advice(desk.engine, "b", "t-a").notice is AdviceKind.CANCEL
    assert advice(desk.engine, "a", "t-x") == Advice(
        0.0, 0, AdviceKind.CANCEL, "the task is not wanted any more"
    )
    desk.work("b", "t-1")
    assert advice(desk.engine, "a", "t-a").notice is AdviceKind.NONE
    desk.work("b", "t-2")
    late = advice(desk.engine, "a", "t-a")
    assert late == Advice(60.0, 2, AdviceKind.UPLOAD_NOW, "version 2 is served, the task is of version 0")
    desk.tick(61.0)
    assert advice(desk.engine, "a", "t-a") == late, "an expired lease is no reason to stop"
    desk.work("b", "t-3", now=61.0)
    desk.work("b", "t-4", now=61.0)
    assert advice(desk.engine, "a", "t-a").notice is AdviceKind.FINISHED


def beat(now: float, client_id: str, task_id: str, progress: float) -> ev.LeaseRenewed:
    return ev.LeaseRenewed(now, client_id, task_id, progress)


def drop(client_id: str, task_id: str) -> ev.TaskDropped:
    return ev.TaskDropped(1.0, client_id, task_id, "")


def logged(desk: Desk, *events: ev.Event) -> list[bool]:
    """Of each event by itself, applied where it is for the log: whether it is."""
    found = []
    for event in events:
        (settled,) = desk.settled(event)
        found.append(settled.event is event)
        if settled.event is not None:
            desk.run.apply(settled)
    return found


def test_what_changes_nothing_is_not_for_the_log() -> None:
    desk = Desk()
    assert logged(desk, drop("b", "t-a"), drop("a", "t-x")) == [False] * 2
    assert logged(desk, drop("a", "t-a"), drop("a", "t-a")) == [
        True,
        False,
    ]
    assert logged(desk, ev.Resumed(1.0), ev.Paused(1.0), ev.Paused(2.0)) == [False, True, False]
    assert logged(desk, ev.Resumed(3.0), ev.Resumed(4.0)) == [True, False]
    assert logged(desk, ev.Released(5.0, "b"), ev.Quarantined(5.0, "b", "x")) == [False, True]
    assert logged(desk, ev.Quarantined(6.0, "b", "x"), ev.Quarantined(6.0, "b", "y")) == [False, True]
    assert logged(desk, ev.Released(7.0, "b"), ev.Released(7.0, "b"), ev.Ticked(8.0)) == [True, False, True]


def test_a_heartbeat_is_for_the_log_where_it_renews_a_lease_of_its_device() -> None:
    desk = Desk(lease_s=60.0)
    assert logged(desk, beat(1.0, "b", "t-a", 1.0), beat(1.0, "a", "t-x", 1.0)) == [False] * 2
    assert logged(desk, beat(0.0, "a", "t-a", 1.0)) == [True], "the first one shows that it is there"
    assert logged(desk, beat(20.0, "a", "t-a", 1.0)) == [False], "it has come no further"
    assert logged(desk, beat(20.0, "a", "t-a", 1.5), ev.Ticked(80.0)) == [True, True]
    assert logged(desk, beat(81.0, "a", "t-a", 2.0)) == [False], "the lease has ended"


def test_while_others_wait_a_place_is_not_renewed_for_ever() -> None:
    desk = Desk(lease_s=10.0, concurrency=1, tenure_leases=2.0)
    assert logged(desk, beat(9.0, "a", "t-a", 1.0), beat(18.0, "a", "t-a", 2.0)) == [True] * 2
    desk.settled(ask("b", "t-b", 27.0))
    assert logged(desk, beat(27.0, "a", "t-a", 3.0)) == [False]
    desk.run.line = NoLine()
    assert logged(desk, beat(27.0, "a", "t-a", 4.0)) == [True]


def test_a_device_that_never_says_the_same_is_told_when_to_come_back() -> None:
    desk = Desk()
    said = [ev.Enrolled(now, "a", Capability(examples=n)) for now, n in ((0.0, 1), (1800.0, 2), (3600.0, 2))]
    first, second, third = (desk.settled(event)[0] for event in said)
    assert (first.event, second.event, third.event) == (said[0], None, said[2])
    assert isinstance(second.error, Overloaded)
    assert second.error.retry_after_s == (1800.0, 3600.0)
    with pytest.raises(Overloaded, match="'a' enrols with another capability too often"):
        desk.run.take(ev.Enrolled(3601.0, "a", Capability(examples=3)))


def test_a_device_that_is_started_again_and_again_says_nothing_new() -> None:
    """Each start enrols twice: before it has looked at its data, and with what it has found."""
    desk = Desk()
    found = Capability(examples=8, memory_bytes=7)
    desk.run.take(ev.Enrolled(0.0, "a", found))
    for now in range(1, 100):
        for said in (Capability(memory_bytes=7), found):
            assert desk.settled(ev.Enrolled(float(now), "a", said)) == [Settlement()]
    (upgraded,) = desk.settled(ev.Enrolled(7200.0, "a", Capability(memory_bytes=9)))
    assert upgraded.event == ev.Enrolled(7200.0, "a", Capability(examples=8, memory_bytes=9))


def test_a_receipt_without_its_digest_is_looked_up() -> None:
    """An engine of a snapshot of before such were kept knows less of an update than the store."""
    told = Receipt("u-1", "t-a", 1, Decision(Verdict.PUBLISHED), "a", "11" * 32)
    desk = Desk(lambda update_id: told if update_id == "u-1" else None)
    desk.run.take(desk.arrived("u-1", sha256=""))
    assert desk.engine.ledger.receipts["u-1"].sha256 == ""
    with pytest.raises(IdTaken, match="with other bytes"):
        desk.run.take(desk.arrived("u-1", sha256="00" * 32))
    assert desk.run.take(desk.arrived("u-1", sha256="11" * 32)).event is None
    assert desk.run.duplicates == 1


def test_advice_where_nothing_hurries() -> None:
    desk = Desk(lease_s=60.0)
    for number in range(4):
        desk.work("b", f"t-{number}")
    assert advice(desk.engine, "a", "t-a") == Advice(60.0, 4)
    assert advice(desk.engine, "b", "t-a") == Advice(
        0.0, 4, AdviceKind.CANCEL, "the task is not wanted any more"
    )
    ended = Desk(versions_max=1)
    ended.work("b", "t-1")
    assert advice(ended.engine, "a", "t-a") == Advice(60.0, 1, AdviceKind.FINISHED, ended.engine.finished)
    assert advice(ended.engine, "b", "t-a") == Advice(0.0, 1, AdviceKind.FINISHED, ended.engine.finished)


def test_time_passes_for_what_is_due_and_not_before() -> None:
    desk = Desk(lease_s=5.0, lease_min_s=5.0)
    due = desk.engine.next_deadline()
    assert due is not None
    assert desk.run.tick(due - 0.001) is None
    assert desk.run.tick(due) == ev.Ticked(due)
    (lost,) = desk.run.take(ev.Ticked(due)).effects
    assert isinstance(lost, LeaseEnded)
    assert desk.run.tick(due + 1e9) is None, "nothing is left to come"
