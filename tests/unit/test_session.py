"""The device machine: events in, effects out, as lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.device.session import (
    HEARTBEAT_JITTER,
    HEARTBEATS_PER_LEASE,
    Phase,
    Session,
    SessionSettings,
)
from anabranch.core.model.updates import Decision, LocalPlan, Reason, Task, Verdict

ACCEPTED = Decision(Verdict.HELD)
LEASE_S = 30.0


class Device:
    """A session with short verbs; time stands still unless a test moves it."""

    def __init__(self, seed: int = 0, **settings: Any) -> None:
        self.session = Session("a", seed, SessionSettings(**settings))
        self.now = 100.0
        self.effects: list[ef.SessionEffect] = []

    def do(self, event_type: type[Any], *values: Any, **named: Any) -> list[ef.SessionEffect]:
        self.effects = self.session.handle(event_type(self.now, *values, **named))
        return self.effects

    @property
    def phase(self) -> Phase:
        return self.session.phase

    @property
    def asked(self) -> str:
        return next(e.task_id for e in self.effects if isinstance(e, ef.AskTask))

    def task(self) -> Task:
        return Task(self.asked, "a", 3, self.now, self.now + LEASE_S, LEASE_S, 1, LocalPlan())

    def timer(self, name: str = "retry") -> float:
        return next(e.at for e in self.effects if isinstance(e, ef.SetTimer) and e.name == name)

    def at(self, phase: Phase) -> Device:
        """Bring a new device to a phase."""
        self.do(ev.Started)
        if phase is Phase.ASKING:
            return self
        self.do(ev.TaskGranted, self.task())
        if phase is Phase.FETCHING:
            return self
        self.do(ev.ModelFetched)
        if phase is Phase.TRAINING:
            return self
        self.do(ev.Trained, self.session.update_id)
        return self


def test_a_task_from_the_ask_to_the_answer() -> None:
    d = Device()
    assert [type(e) for e in d.do(ev.Started)] == [ef.AskTask]
    task = d.task()
    beat, fetch = d.do(ev.TaskGranted, task)
    assert isinstance(beat, ef.SetTimer)
    assert (beat.name, fetch) == ("heartbeat", ef.FetchModel(task))
    (train,) = d.do(ev.ModelFetched)
    assert isinstance(train, ef.Train)
    assert train.task == task
    assert d.do(ev.Trained, train.update_id) == [ef.Push(train.update_id)]
    discard, ask = d.do(ev.PushAcknowledged, train.update_id, ACCEPTED)
    assert discard == ef.Discard(train.update_id)
    assert isinstance(ask, ef.AskTask)
    assert ask.task_id != task.task_id
    assert d.session.answered == 1


def test_devices_of_one_seed_ask_under_ids_of_their_own() -> None:
    asked = [
        effect.task_id
        for client in "aab"
        for effect in Session(client, 0).handle(ev.Started(100.0))
        if isinstance(effect, ef.AskTask)
    ]
    assert asked[0] == asked[1] != asked[2]


def test_what_the_outbox_holds_goes_first() -> None:
    d = Device()
    assert d.do(ev.Started, "u-old") == [ef.Push("u-old")]
    assert [type(e) for e in d.do(ev.PushAcknowledged, "u-old", ACCEPTED)] == [ef.Discard, ef.AskTask]


def test_it_stops_after_its_tasks() -> None:
    d = Device(tasks_max=1).at(Phase.PUSHING)
    assert d.do(ev.PushAcknowledged, d.session.update_id, ACCEPTED)[1:] == [ef.Stop("1 tasks done")]
    assert d.phase is Phase.STOPPED
    assert d.do(ev.Started) == []


# --- refusals and failures -----------------------------------------------------------------------


def test_a_refusal_is_waited_out_within_the_servers_window() -> None:
    d = Device().at(Phase.ASKING)
    first = d.asked
    d.do(ev.TaskRefused, (7.0, 9.0), "full")
    assert d.phase is Phase.WAITING
    assert 107.0 <= d.timer() <= 109.0
    d.now = d.timer()
    d.do(ev.TimerFired, "retry")
    assert d.asked != first


def test_a_final_refusal_ends_it() -> None:
    d = Device().at(Phase.ASKING)
    assert d.do(ev.TaskRefused, (0.0, 0.0), "the run ended", final=True) == [ef.Stop("the run ended")]


@pytest.mark.parametrize("phase", [Phase.ASKING, Phase.FETCHING, Phase.PUSHING])
def test_a_failed_call_is_repeated_under_the_same_id(phase: Phase) -> None:
    d = Device().at(phase)
    same = [e for e in d.effects if not isinstance(e, ef.SetTimer)]
    d.do(ev.CallFailed, "no route", retryable=True)
    assert d.phase is Phase.WAITING
    assert d.do(ev.TimerFired, "retry") == same
    assert d.phase is phase


def test_the_servers_window_wins_over_the_own_backoff() -> None:
    d = Device(retry_base_s=0.001).at(Phase.PUSHING)
    d.do(ev.CallFailed, "busy", retryable=True, retry_after_s=(40.0, 41.0))
    assert 140.0 <= d.timer() <= 141.0


def test_an_ask_that_cannot_succeed_ends_it() -> None:
    d = Device().at(Phase.ASKING)
    assert d.do(ev.CallFailed, "bad id", retryable=False) == [ef.Stop("bad id")]


REJECTED = Decision(Verdict.REJECTED, reason=Reason.INVALID, detail="not finite")


def rejected(d: Device, as_error: bool) -> list[ef.SessionEffect]:
    """The server does not take the result: it says so as an answer, or as an error."""
    if as_error:
        return d.do(ev.CallFailed, "not finite", retryable=False, flawed=True)
    return d.do(ev.PushAcknowledged, d.session.update_id, REJECTED)


def again(d: Device) -> None:
    """From an ask to the next push."""
    d.do(ev.TaskGranted, d.task())
    d.do(ev.ModelFetched)
    d.do(ev.Trained, d.session.update_id)


@pytest.mark.parametrize("as_error", [False, True])
def test_rejections_in_a_row_are_backed_off_from_longer_up_to_a_bound(as_error: bool) -> None:
    def pauses(seed: int) -> list[float]:
        d, found = Device(seed, retry_base_s=1.0, retry_cap_s=60.0).at(Phase.PUSHING), []
        for _ in range(12):
            discard, wait = rejected(d, as_error)
            assert isinstance(discard, ef.Discard)
            assert isinstance(wait, ef.SetTimer)
            assert d.session.task is None, "no lease is kept meanwhile"
            found.append(d.timer() - d.now)
            d.now = d.timer()
            d.do(ev.TimerFired, "retry")
            again(d)
        return found

    rows = [pauses(seed) for seed in range(200)]
    for number, column in enumerate(zip(*rows, strict=True)):
        most = min(8.0, 2.0 ** (number + 1))
        assert max(column) <= most
        assert sum(column) / len(column) == pytest.approx(most / 2.0, rel=0.15), "full jitter"


def test_an_update_that_is_taken_ends_the_backing_off() -> None:
    d = Device().at(Phase.PUSHING)
    rejected(d, as_error=False)
    d.now = d.timer()
    d.do(ev.TimerFired, "retry")
    again(d)
    _, ask = d.do(ev.PushAcknowledged, d.session.update_id, ACCEPTED)
    assert isinstance(ask, ef.AskTask)


@pytest.mark.parametrize("reason", [Reason.STALE, Reason.ROUND_OVER, Reason.UNKNOWN_TASK])
def test_a_device_that_is_only_late_does_not_back_off(reason: Reason) -> None:
    d = Device().at(Phase.PUSHING)
    late = Decision(Verdict.REJECTED, reason=reason)
    _, ask = d.do(ev.PushAcknowledged, d.session.update_id, late)
    assert isinstance(ask, ef.AskTask)


def test_a_training_that_diverges_is_given_back_and_backed_off_from() -> None:
    d = Device().at(Phase.TRAINING)
    task = d.session.task
    assert task is not None
    back, wait = d.do(ev.CallFailed, "the loss is NaN", retryable=False, flawed=True)
    assert back == ef.GiveBack(task.task_id, "the loss is NaN", diverged=True)
    assert isinstance(wait, ef.SetTimer)


def test_a_push_that_cannot_succeed_is_discarded_and_work_goes_on() -> None:
    d = Device().at(Phase.PUSHING)
    update_id = d.session.update_id
    discard, wait = d.do(ev.CallFailed, "refused", retryable=False)
    assert discard == ef.Discard(str(update_id))
    assert isinstance(wait, ef.SetTimer), "it backs off: somebody may fight over its tasks"


def test_a_result_that_cannot_be_kept_is_given_up() -> None:
    """A full disk on the device: the outbox refuses the result, a later task may fit."""
    d = Device().at(Phase.TRAINING)
    (wait,) = d.do(ev.CallFailed, "no space left", retryable=True)
    assert isinstance(wait, ef.SetTimer)
    assert d.session.task is None


@pytest.mark.parametrize("phase", [Phase.FETCHING, Phase.TRAINING])
def test_work_that_cannot_succeed_is_given_up(phase: Phase) -> None:
    d = Device().at(phase)
    d.do(ev.CallFailed, "unknown codec", retryable=False)
    assert d.session.task is None
    assert [type(e) for e in d.do(ev.TimerFired, "retry")] == [ef.AskTask]


def test_tasks_that_fail_each_time_are_asked_for_ever_more_slowly() -> None:
    d, latest = Device(retry_base_s=1.0, retry_cap_s=1e9).at(Phase.ASKING), []
    for _ in range(12):
        d.do(ev.TaskGranted, d.task())
        d.do(ev.CallFailed, "unknown codec", retryable=False)
        latest.append(d.timer() - d.now)
        d.do(ev.TimerFired, "retry")
    assert max(latest[6:]) > 2.0**6  # a window that does not grow would stay under 2 s
    assert d.session.failures == 12


@pytest.mark.parametrize("where", ["on the device", "at the server"])
def test_a_lone_device_that_diverges_ends_its_run_in_minutes(where: str) -> None:
    """A hundred results that are of no use, which the server must see to give the run up, and no flood."""
    d, waited_s = Device().at(Phase.ASKING), 0.0
    rejected = Decision(Verdict.REJECTED, reason=Reason.INVALID)
    for _ in range(100):
        d.do(ev.TaskGranted, d.task())
        if where == "on the device":
            d.do(ev.CallFailed, "not finite", retryable=False, flawed=True)
        else:
            d.do(ev.ModelFetched)
            d.do(ev.Trained, d.session.update_id)
            d.do(ev.PushAcknowledged, d.session.update_id, rejected)
        waited_s += d.timer() - d.now
        d.do(ev.TimerFired, "retry")
    assert 100.0 < waited_s < 300.0


@given(failures=st.integers(1, 2000), seed=st.integers(0, 2**32), base_s=st.floats(0.01, 5.0))
def test_the_backoff_has_full_jitter_and_a_cap(failures: int, seed: int, base_s: float) -> None:
    d = Device(seed, retry_base_s=base_s, retry_cap_s=60.0).at(Phase.PUSHING)
    for n in range(1, failures + 1):
        d.do(ev.CallFailed, "no route", retryable=True)
        delay_s = d.timer() - d.now
        assert 0.0 <= delay_s <= min(60.0, base_s * 2.0 ** min(n, 60)) * (1 + 1e-9)
        if n < failures:
            d.do(ev.TimerFired, "retry")


def test_success_forgets_the_failures() -> None:
    d = Device().at(Phase.ASKING)
    task = d.task()
    for _ in range(5):
        d.do(ev.CallFailed, "no route", retryable=True)
        d.do(ev.TimerFired, "retry")
    d.do(ev.TaskGranted, task)
    assert d.session.failures == 0


# --- cancelling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.FETCHING, Phase.TRAINING])
def test_work_that_is_not_wanted_stops(phase: Phase) -> None:
    d = Device().at(phase)
    task = d.session.task
    assert task is not None
    stop, ask = d.do(ev.TaskCancelled, task.task_id)
    assert stop == ef.StopTraining(task.task_id)
    assert isinstance(ask, ef.AskTask)
    assert d.session.task is None


def test_a_finished_result_is_pushed_though_its_task_was_cancelled() -> None:
    d = Device().at(Phase.PUSHING)
    task = d.session.task
    assert task is not None
    assert d.do(ev.TaskCancelled, task.task_id) == []
    d.do(ev.CallFailed, "no route", retryable=True)
    assert d.do(ev.TaskCancelled, task.task_id) == []
    assert [type(e) for e in d.do(ev.TimerFired, "retry")] == [ef.Push]


def test_the_wait_before_a_second_fetch_is_cancelled_too() -> None:
    d = Device().at(Phase.FETCHING)
    task = d.session.task
    assert task is not None
    d.do(ev.CallFailed, "no route", retryable=True)
    assert [type(e) for e in d.do(ev.TaskCancelled, task.task_id)] == [ef.StopTraining, ef.AskTask]


# --- what comes too late -------------------------------------------------------------------------

FOREIGN = Task("other", "a", 3, 0.0, 30.0, 30.0, 1, LocalPlan())
LATE: dict[str, tuple[type[Any], tuple[Any, ...]]] = {
    "a grant": (ev.TaskGranted, (FOREIGN,)),
    "a training": (ev.Trained, ("other",)),
    "an answer": (ev.PushAcknowledged, ("other", ACCEPTED)),
    "a notice": (ev.TaskCancelled, ("other",)),
    "a timer": (ev.TimerFired, ("retry",)),
}


@pytest.mark.parametrize("phase", [Phase.ASKING, Phase.FETCHING, Phase.TRAINING, Phase.PUSHING])
@pytest.mark.parametrize("late", LATE)
def test_what_belongs_to_other_work_changes_nothing(phase: Phase, late: str) -> None:
    d = Device().at(phase)
    task = d.session.task
    event_type, values = LATE[late]
    assert d.do(event_type, *values) == []
    assert (d.phase, d.session.task) == (phase, task)


@pytest.mark.parametrize("retryable", [True, False])
def test_a_failure_while_waiting_does_not_lose_the_result(retryable: bool) -> None:
    d = Device().at(Phase.PUSHING)
    update_id = d.session.update_id
    d.do(ev.CallFailed, "no route", retryable=True)
    assert d.do(ev.CallFailed, "the same, again", retryable=retryable) == []
    assert d.do(ev.TimerFired, "retry") == [ef.Push(str(update_id))]


def test_a_late_answer_ends_the_wait() -> None:
    d = Device().at(Phase.PUSHING)
    d.do(ev.CallFailed, "timeout", retryable=True)
    effects = d.do(ev.PushAcknowledged, d.session.update_id, ACCEPTED)
    assert [type(e) for e in effects] == [ef.Discard, ef.AskTask]
    assert d.do(ev.TimerFired, "retry") == []


# --- heartbeats and ids --------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32))
def test_heartbeats_come_thrice_a_lease_with_jitter(seed: int) -> None:
    d = Device(seed).at(Phase.FETCHING)
    every = LEASE_S / HEARTBEATS_PER_LEASE
    for _ in range(3):
        delay_s = d.timer("heartbeat") - d.now
        assert every * (1 - HEARTBEAT_JITTER) <= delay_s <= every * (1 + HEARTBEAT_JITTER)
        d.now = d.timer("heartbeat")
        renew, _ = d.do(ev.TimerFired, "heartbeat")
        assert isinstance(renew, ef.Renew)


def test_without_a_task_there_is_no_heartbeat() -> None:
    d = Device().at(Phase.PUSHING)
    assert d.do(ev.TimerFired, "heartbeat") != []
    d.do(ev.PushAcknowledged, d.session.update_id, ACCEPTED)
    assert d.do(ev.TimerFired, "heartbeat") == []


def test_ids_come_of_the_seed_alone() -> None:
    first, again, other = (Device(seed).at(Phase.ASKING).asked for seed in (1, 1, 2))
    assert first == again != other
