"""The device machine with two lanes: events in, effects out, as lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_lists import lists_up_to
from machines import Bench, decision

from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.device.overlap import OverlapSession
from anabranch.core.device.session import Phase, SessionSettings
from anabranch.core.model.updates import Decision, LocalPlan, Reason, Task, Verdict

ACCEPTED = Decision(Verdict.HELD)
LEASE_S = 30.0
WINDOW = (1.0, 2.0)


class Device:
    """A session with short verbs; time stands still unless a test moves it."""

    def __init__(self, seed: int = 0, **settings: Any) -> None:
        limits = SessionSettings(**({"tasks_held_max": 2} | settings))
        self.session = OverlapSession("a", seed, limits)
        self.now = 100.0
        self.effects: list[ef.SessionEffect] = []
        self.tasks: list[Task] = []

    def do(self, event_type: type[Any], *values: Any, **named: Any) -> list[ef.SessionEffect]:
        self.effects = self.session.handle(event_type(self.now, *values, **named))
        return self.effects

    @property
    def asked(self) -> str:
        return next(e.task_id for e in self.effects if isinstance(e, ef.AskTask))

    def timer(self, name: str) -> float:
        return next(e.at for e in self.effects if isinstance(e, ef.SetTimer) and e.name == name)

    def granted(self, lease_s: float = LEASE_S) -> Task:
        task = Task(self.asked, "a", 3, self.now, self.now + lease_s, lease_s, 1, LocalPlan())
        self.tasks.append(task)
        self.do(ev.TaskGranted, task)
        return task

    def trained(self, lease_s: float = LEASE_S) -> str:
        """From an ask to the result; what follows is in `effects`."""
        self.granted(lease_s)
        (train,) = self.do(ev.ModelFetched)
        assert isinstance(train, ef.Train)
        self.do(ev.Trained, train.update_id)
        return train.update_id

    def acknowledge(self, update_id: str) -> list[ef.SessionEffect]:
        return self.do(ev.PushAcknowledged, update_id, ACCEPTED)

    def push_fails(self, update_id: str, retryable: bool = True, **named: Any) -> list[ef.SessionEffect]:
        return self.do(ev.CallFailed, "no route", retryable, update_id=update_id, **named)


def started(**settings: Any) -> Device:
    d = Device(**settings)
    d.do(ev.Started)
    return d


def kinds(effects: list[ef.SessionEffect]) -> list[type[Any]]:
    return [type(e) for e in effects]


def test_the_next_task_is_asked_for_while_the_result_is_on_its_way() -> None:
    d = started()
    first = d.trained()
    push, ask = d.effects
    assert push == ef.Push(first)
    assert isinstance(ask, ef.AskTask)
    d.granted()
    d.do(ev.ModelFetched)
    assert d.session.phase is Phase.TRAINING
    assert d.acknowledge(first) == [ef.Discard(first)]
    assert (d.session.phase, d.session.answered) == (Phase.TRAINING, 1)


def test_there_are_never_more_tasks_than_the_server_allows() -> None:
    d = started()
    first, second = d.trained(), d.trained()
    assert d.effects == []
    assert d.session.phase is Phase.PUSHING
    discard, push, ask = d.acknowledge(first)
    assert (discard, push) == (ef.Discard(first), ef.Push(second))
    assert isinstance(ask, ef.AskTask)


def test_with_room_for_one_task_it_takes_turns() -> None:
    d = started(tasks_held_max=1)
    first = d.trained()
    assert d.effects == [ef.Push(first)]
    assert kinds(d.acknowledge(first)) == [ef.Discard, ef.AskTask]


def test_results_leave_one_at_a_time_oldest_first() -> None:
    d = started(tasks_held_max=3)
    ids = [d.trained() for _ in range(3)]
    sent = [ids[0]]
    for update_id in ids:
        assert sent[-1] == update_id
        sent += [e.update_id for e in d.acknowledge(update_id) if isinstance(e, ef.Push)]
    assert sent == ids


def test_a_push_that_fails_backs_off_by_itself_and_training_goes_on() -> None:
    d = started()
    first = d.trained()
    d.granted()
    d.do(ev.ModelFetched)
    d.push_fails(first, retry_after_s=WINDOW)
    assert d.session.phase is Phase.TRAINING
    assert 101.0 <= d.timer("push") <= 102.0
    assert d.do(ev.TimerFired, "push") == [ef.Push(first)]
    assert d.do(ev.TimerFired, "push") == []


def test_a_call_of_the_work_lane_that_fails_leaves_the_push_alone() -> None:
    d = started()
    first = d.trained()
    task = d.granted()
    (wait,) = d.do(ev.CallFailed, "no route", True)
    assert isinstance(wait, ef.SetTimer)
    assert d.do(ev.TimerFired, "retry") == [ef.FetchModel(task)]
    assert d.acknowledge(first) == [ef.Discard(first)]


def test_a_push_that_cannot_succeed_makes_room() -> None:
    d = started()
    first, second = d.trained(), d.trained()
    effects = d.push_fails(first, retryable=False)
    assert effects[:2] == [ef.Discard(first), ef.Push(second)]
    assert isinstance(effects[2], ef.SetTimer), "it asks, after it has backed off"
    assert effects[2].name == "retry"
    assert d.session.answered == 0


def test_a_failure_while_it_backs_off_already_changes_nothing() -> None:
    d = started()
    first = d.trained()
    d.push_fails(first)
    assert d.push_fails(first, retryable=False) == []
    assert d.do(ev.TimerFired, "push") == [ef.Push(first)]


def test_a_late_answer_ends_the_backing_off() -> None:
    d = started()
    first = d.trained()
    d.push_fails(first)
    assert d.acknowledge(first) == [ef.Discard(first)]
    assert d.do(ev.TimerFired, "push") == []


def test_while_there_is_no_room_a_failure_of_no_push_changes_nothing() -> None:
    d = started()
    d.trained()
    d.trained()
    assert d.do(ev.CallFailed, "late", retryable=False) == []
    assert d.session.phase is Phase.PUSHING


def test_what_an_earlier_life_left_goes_before_a_task_is_asked_for() -> None:
    """The server may know of a task that died with that life: an ask would give the oldest one up."""
    d = Device()
    assert kinds(d.do(ev.Started, "u-1", ("u-2",))) == [ef.Push]
    assert kinds(d.acknowledge("u-1")) == [ef.Discard, ef.Push]
    assert kinds(d.acknowledge("u-2")) == [ef.Discard, ef.AskTask]


def test_a_task_that_failed_is_given_back_before_the_next_ask() -> None:
    d = started()
    d.trained()
    task = d.granted()
    give_back, wait = d.do(ev.CallFailed, "unknown codec", retryable=False)
    assert give_back == ef.GiveBack(task.task_id, "unknown codec")
    assert isinstance(wait, ef.SetTimer)


def test_it_stops_after_its_tasks_and_never_asks_for_more() -> None:
    d = started(tasks_max=2)
    first, second = d.trained(), d.trained()
    assert d.effects == []
    d.acknowledge(first)
    assert not any(isinstance(e, ef.AskTask) for e in d.effects)
    assert d.acknowledge(second) == [ef.Discard(second), ef.Stop("2 tasks done")]


def test_at_the_end_of_the_run_it_waits_for_its_answers() -> None:
    d = started()
    first = d.trained()
    assert d.do(ev.TaskRefused, WINDOW, "the run ended", final=True) == []
    assert d.acknowledge(first) == [ef.Discard(first), ef.Stop("the run ended")]
    assert started().do(ev.TaskRefused, WINDOW, "over", final=True) == [ef.Stop("over")]


def test_a_refusal_is_waited_out_while_a_result_is_on_its_way() -> None:
    d = started()
    first = d.trained()
    d.do(ev.TaskRefused, WINDOW, "full")
    assert d.acknowledge(first) == [ef.Discard(first)]
    assert kinds(d.do(ev.TimerFired, "retry")) == [ef.AskTask]


def test_the_leases_of_all_tasks_are_kept_by_the_shortest() -> None:
    d = started()
    d.trained(lease_s=6.0)
    d.granted(lease_s=600.0)
    assert d.timer("heartbeat") - d.now < 6.0
    *renewals, timer = d.do(ev.TimerFired, "heartbeat")
    assert renewals == [ef.Renew(task) for task in d.tasks]
    assert isinstance(timer, ef.SetTimer)


def test_a_notice_stops_the_work_at_hand_and_leaves_results_alone() -> None:
    d = started()
    first = d.trained()
    d.granted()
    d.do(ev.ModelFetched)
    assert d.do(ev.TaskCancelled, d.tasks[0].task_id) == []
    assert kinds(d.do(ev.TaskCancelled, d.tasks[1].task_id)) == [ef.StopTraining, ef.AskTask]
    assert d.acknowledge(first) == [ef.Discard(first)]


# --- the engine's side ---------------------------------------------------------------------------


def test_a_late_result_still_counts_where_the_client_may_hold_its_task_beside_another() -> None:
    bench = Bench(tasks_per_client=2, lease_s=10.0)
    bench.enrol("a")
    bench.ask("a", "t0")
    bench.tick(11.0)
    bench.ask("a", "t1", now=12.0)
    assert decision(bench.push("a", "t0", now=13.0)).verdict is Verdict.HELD
    bench.tick(30.0)
    bench.ask("a", "t2", now=31.0)
    bench.ask("a", "t3", now=32.0)
    assert set(bench.engine.ledger.tasks) == {"t2", "t3"}, "expired ones go first"


# --- any order of things -------------------------------------------------------------------------


class Lanes:
    """A world around a session: it obeys every effect, in whatever order the draws say."""

    def __init__(self, held_max: int) -> None:
        self.session = OverlapSession("a", 1, SessionSettings(tasks_held_max=held_max))
        self.held_max = held_max
        self.calls: dict[str, ef.SessionEffect] = {}  # what is in flight, by lane
        self.timers: set[str] = set()
        self.outbox: list[str] = []
        self.answered: list[str] = []
        self.unwanted: list[str] = []  # which the server does not take, for good
        self.trained: list[str] = []
        self.obey(self.session.handle(ev.Started(0.0)))

    def obey(self, effects: list[ef.SessionEffect]) -> None:
        for effect in effects:
            match effect:
                case ef.AskTask() | ef.FetchModel() | ef.Train():
                    assert "work" not in self.calls, "two calls in one lane"
                    self.calls["work"] = effect
                case ef.Push(update_id):
                    assert "push" not in self.calls, "two pushes at a time"
                    assert update_id == self.outbox[0], "not the oldest"
                    self.calls["push"] = effect
                case ef.Discard(update_id):
                    assert update_id == self.outbox.pop(0)
                    assert update_id in (*self.answered, *self.unwanted), "lost"
                case ef.SetTimer(name):
                    self.timers.add(name)
        work = self.session.task is not None or "work" in self.calls
        assert len(self.outbox) + work <= max(self.held_max, len(self.outbox))

    def turn(self, lane: str, fails: bool, retryable: bool) -> None:
        if lane in ("retry", "push-timer"):
            name = lane.removesuffix("-timer")
            if name in self.timers:
                self.timers.discard(name)
                self.obey(self.session.handle(ev.TimerFired(0.0, name)))
            return
        call = self.calls.pop(lane, None)
        if call is not None:
            self.obey(self.session.handle(self._event(call, fails, retryable)))

    def _event(self, call: ef.SessionEffect, fails: bool, retryable: bool) -> ev.SessionEvent:
        match call:
            case ef.Push(update_id) if fails:
                self.unwanted += [] if retryable else [update_id]
                return ev.CallFailed(0.0, "lost", retryable, update_id=update_id)
            case ef.Push(update_id):
                self.answered.append(update_id)
                return ev.PushAcknowledged(0.0, update_id, ACCEPTED)
            case ef.AskTask(task_id):
                if fails:
                    return ev.TaskRefused(0.0, WINDOW, "full")
                return ev.TaskGranted(0.0, Task(task_id, "a", 0, 0.0, 9.0, 9.0, 1, LocalPlan()))
            case _ if fails:
                return ev.CallFailed(0.0, "lost", retryable)
            case ef.FetchModel():
                return ev.ModelFetched(0.0)
            case ef.Train(_, update_id):
                self.outbox.append(update_id)
                self.trained.append(update_id)
                return ev.Trained(0.0, update_id)
        raise AssertionError(call)


# Whose turn it is, whether it fails, whether it may be tried again. Most work succeeds, or nothing is pushed.
TURNS = lists_up_to(
    80,
    st.sampled_from(
        [("work", False, True)] * 5
        + [("work", True, True), ("work", True, False)]
        + [("push", False, True), ("push", True, True), ("push", True, True), ("push", True, False)]
        + [("retry", False, True), ("push-timer", False, True)] * 3
    ),
)


@given(turns=TURNS, held_max=st.integers(1, 3))
def test_in_any_order_nothing_is_lost_doubled_or_stuck(
    turns: list[tuple[str, bool, bool]], held_max: int
) -> None:
    world = Lanes(held_max)
    for turn in turns:
        world.turn(*turn)
    for _ in range(12):  # from then on all goes well
        for lane in ("work", "push", "retry", "push-timer"):
            world.turn(lane, fails=False, retryable=True)
    assert len(set(world.answered)) == len(world.answered)
    assert len(world.answered) > 2, "it stands still"
    assert {*world.answered, *world.unwanted, *world.outbox} == set(world.trained)
    assert len(world.outbox) <= 1, "what is left is the newest, if that"


# --- what cannot be used -------------------------------------------------------------------------

REJECTED = Decision(Verdict.REJECTED, reason=Reason.INVALID)


@pytest.mark.parametrize("as_error", [False, True])
def test_after_a_rejection_the_next_ask_is_put_off(as_error: bool) -> None:
    d = Device(retry_base_s=1.0)
    d.do(ev.Started)
    first = d.trained()
    d.granted()  # it trains on while the first result is on its way
    if as_error:
        effects = d.push_fails(first, retryable=False, flawed=True)
    else:
        effects = d.do(ev.PushAcknowledged, first, REJECTED)
    assert effects == [ef.Discard(first)]
    (train,) = d.do(ev.ModelFetched)
    assert isinstance(train, ef.Train)
    push, wait = d.do(ev.Trained, train.update_id)
    assert push == ef.Push(train.update_id)
    assert isinstance(wait, ef.SetTimer)
    assert 0.0 <= wait.at - d.now <= 2.0
    d.now = wait.at
    (ask,) = d.do(ev.TimerFired, "retry")
    assert isinstance(ask, ef.AskTask)


def test_a_diverged_training_is_given_back_once() -> None:
    d = Device()
    d.do(ev.Started)
    task = d.granted()
    d.do(ev.ModelFetched)
    back, wait = d.do(ev.CallFailed, "NaN", retryable=False, flawed=True)
    assert back == ef.GiveBack(task.task_id, "NaN", diverged=True)
    assert isinstance(wait, ef.SetTimer)
