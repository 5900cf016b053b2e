"""The shell round a device's session: what becomes of answers, errors and notices, as lists of deeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from anabranch.core import effects as ef
from anabranch.core.device.session import Phase, Session, SessionSettings
from anabranch.core.errors import InvalidUpdate, StoreFull, Unavailable, UnknownTask
from anabranch.core.model.updates import Ask, Decision, LocalPlan, Reason, Task, Verdict
from anabranch.host.device import DeviceCall, DeviceShell
from anabranch.host.run import AdviceKind


class Bench(DeviceShell):
    """A device whose driver writes down what it is to do; nothing comes of it by itself."""

    def __init__(self, *waiting: str, **settings: Any) -> None:
        self.session = Session("a", 1, SessionSettings(**settings))
        self.done: list[str] = []
        self.waiting = list(waiting)

    @property
    def _now(self) -> float:
        return 10.0

    def _order(self, effect: ef.SessionEffect, now: float) -> None:
        self._obey(effect, now)

    def _enrol(self, then: Callable[[], None]) -> None:
        self.done.append("enrol")
        then()

    def _ask(self, task_id: str, now: float) -> None:
        self.done.append("ask")
        self.task_id = task_id

    def _fetch(self, task: Task) -> None:
        self.done.append("fetch")

    def _train(self, order: ef.Train) -> None:
        self.done.append("train")
        self.update_id = order.update_id

    def _push(self, order: ef.Push) -> None:
        self.done.append(f"push {'and ask' if order.next_task_id else order.update_id[:4]}")
        self.next_task_id = order.next_task_id

    def _renew(self, task: Task, now: float) -> None:
        self.done.append("renew")

    def _give_back(self, order: ef.GiveBack, now: float) -> None:
        self.done.append(f"give back: {order.why}")

    def _set_timer(self, timer: ef.SetTimer) -> None:
        if timer.name != "heartbeat":
            self.done.append(f"wait until {timer.at:.0f}")

    def _stop_work(self, task_id: str) -> None:
        self.done.append("stop work")

    def _end(self, why: str) -> None:
        self.done.append(f"end: {why}")

    def _advised(self) -> None:
        self.done.append("advised")

    def _unwanted(self, task_id: str) -> None:
        self._cancelled(task_id)

    def _waiting(self) -> Sequence[str]:
        return self.waiting

    def _commit(self, update_id: str) -> None:
        self.done.append("commit")

    def _discard(self, update_id: str) -> None:
        self.done.append("discard")

    def _forget(self) -> None:
        self.done.append("forget")

    def since(self) -> list[str]:
        """What was done since this was last asked."""
        done, self.done = self.done, []
        return done

    def grant(self, task_id: str = "") -> Task:
        """A task, of the last ask unless it is named."""
        return Task(task_id or self.task_id, "a", 0, 10.0, 70.0, 60.0, 1, LocalPlan())

    def to_training(self) -> None:
        """As far as the training of its first task."""
        self._begin()
        self._answered(self.grant(), 10.0)
        self._fetched()
        assert self.since() == ["ask", "fetch", "train"]

    def to_pushing(self) -> None:
        """As far as the push of its first result."""
        self.to_training()
        self._trained(self.update_id)
        assert len(self.since()) == 1


def refused(reason: Reason, final: bool = False) -> ef.Refused:
    return ef.Refused(Ask("a", "t"), reason, "not now", (5.0, 5.0), final)


def test_what_an_earlier_life_has_left_goes_first() -> None:
    bench = Bench("u-1a", "u-2b")
    bench._begin()
    assert bench.since() == ["push u-1a"]
    bench._acknowledged("u-1a", Decision(Verdict.PUBLISHED, 0, 1.0))
    assert bench.since() == ["commit", "discard", "push u-2b"]


def test_a_refusal_is_waited_for_and_the_last_one_ends_all() -> None:
    bench = Bench()
    bench._begin()
    bench._answered(refused(Reason.AT_CAPACITY), 20.0)
    assert bench.since() == ["ask", "wait until 25"]
    ended = Bench()
    ended._begin()
    ended._answered(refused(Reason.RUN_FINISHED, final=True), 20.0)
    assert ended.since() == ["ask", "end: not now"]


def test_whom_the_server_does_not_know_enrols_and_then_has_its_refusal() -> None:
    bench = Bench()
    bench._begin()
    bench._answered(refused(Reason.UNKNOWN_CLIENT), 20.0)
    assert bench.since() == ["ask", "enrol", "wait until 15"]


@pytest.mark.parametrize("verdict", list(Verdict))
def test_what_the_uplink_remembers_counts_unless_the_update_is_rejected(verdict: Verdict) -> None:
    bench = Bench()
    bench.to_pushing()
    told: list[str] = []
    bench._acknowledged(bench.update_id, Decision(verdict, 0, 1.0), tell=lambda: told.extend(bench.since()))
    counts = ["commit"] if verdict is not Verdict.REJECTED else []
    assert told == counts, "who is told finds it on the disk"
    assert bench.since() == ["discard", "ask"]


def test_a_push_may_bring_the_next_task() -> None:
    bench = Bench(ask_with_push=True)
    bench.to_pushing()
    task = bench.grant(bench.next_task_id)
    bench._acknowledged(bench.update_id, Decision(Verdict.PUBLISHED, 0, 1.0), task)
    assert bench.since() == ["commit", "discard", "fetch"]
    assert bench.session.task == task


def test_a_training_that_diverges_is_forgotten_and_its_task_given_back() -> None:
    bench = Bench()
    bench.to_training()
    bench._failed(DeviceCall.TRAIN, InvalidUpdate("no numbers"))
    forgot, back, waits = bench.since()
    assert (forgot, back) == ("forget", "give back: no numbers")
    assert waits.startswith("wait until")


def test_a_disk_without_room_is_not_a_divergence() -> None:
    bench = Bench()
    bench.to_training()
    bench._failed(DeviceCall.TRAIN, StoreFull("the disk is full"))
    (waits,) = bench.since()
    assert waits.startswith("wait until")


@pytest.mark.parametrize(
    ("error", "flaws", "lost"),
    [(InvalidUpdate("of another codec"), 1, 0), (UnknownTask("the task ended"), 0, 1)],
    ids=lambda value: type(value).__name__,
)
def test_a_result_that_is_not_taken_is_given_up(error: UnknownTask, flaws: int, lost: int) -> None:
    bench = Bench()
    bench.to_pushing()
    bench._failed(DeviceCall.PUSH, error, bench.update_id)
    discard, waits = bench.since()
    assert discard == "discard"
    assert waits.startswith("wait until")
    assert (bench.session.flaws, bench.session.lost) == (flaws, lost)


@pytest.mark.parametrize("verdict_comes", [True, False], ids=["a verdict", "an error"])
def test_a_flaw_is_an_answer_whichever_way_it_is_told(verdict_comes: bool) -> None:
    """A device that shall do two tasks has done them, though neither was of any use."""
    bench, flawed = Bench(tasks_max=2), Decision(Verdict.REJECTED, 0, None, Reason.INVALID, "no numbers")
    for turn in range(2):
        bench.to_pushing()
        bench.since()
        if verdict_comes:
            bench._acknowledged(bench.update_id, flawed)
        else:
            bench._failed(DeviceCall.PUSH, InvalidUpdate("no numbers"), bench.update_id)
        discard, then = bench.since()
        assert discard == "discard"
        assert then.startswith("wait until") if not turn else then == "end: 2 tasks done"
    assert (bench.session.answered, bench.session.flaws, bench.session.lost) == (2, 2, 0)


def test_a_result_that_nobody_answered_is_kept() -> None:
    bench = Bench()
    bench.to_pushing()
    bench._failed(DeviceCall.PUSH, Unavailable("no answer in time"), bench.update_id)
    (waits,) = bench.since()
    assert waits.startswith("wait until")
    assert bench.session.phase is Phase.WAITING


def test_the_driver_may_know_that_a_call_is_worth_repeating() -> None:
    bench = Bench()
    bench._begin()
    bench._failed(DeviceCall.ASK, InvalidUpdate("another model"), again=True)
    assert bench.session.phase is Phase.WAITING
    stopped = Bench()
    stopped._begin()
    stopped._failed(DeviceCall.ASK, InvalidUpdate("another model"))
    assert stopped.since() == ["ask", "end: another model"]


@pytest.mark.parametrize(
    ("notice", "comes_of_it"),
    [
        (AdviceKind.NONE, []),
        ("other", []),
        ("refresh", []),
        (AdviceKind.UPLOAD_NOW, ["advised"]),
        (AdviceKind.CANCEL, ["stop work", "ask"]),
        (AdviceKind.FINISHED, ["stop work", "ask"]),
    ],
)
def test_what_a_notice_means(notice: str, comes_of_it: list[str]) -> None:
    bench = Bench()
    bench.to_training()
    assert bench.session.task is not None
    bench._noticed(bench.session.task.task_id, notice)
    assert bench.since() == comes_of_it


def test_a_finished_result_is_pushed_though_its_task_is_not_wanted() -> None:
    bench = Bench()
    bench.to_pushing()
    bench._noticed(bench.task_id, AdviceKind.CANCEL)
    assert bench.since() == []


def test_what_was_cancelled_before_its_turn_is_not_begun() -> None:
    bench = Bench()
    bench.to_training()
    task = bench.session.task
    assert task is not None
    bench._cancelled(task.task_id)
    bench.since()
    for order in (ef.FetchModel(task), ef.Train(task, "u")):
        bench._obey(order, 10.0)
    assert bench.since() == []
