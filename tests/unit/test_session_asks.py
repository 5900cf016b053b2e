"""When a device asks for its next task: with its push, at once, or later and later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.device.session import FLAWED_MAX, LOST_MAX, Phase, Session, SessionSettings
from anabranch.core.model.updates import Decision, LocalPlan, Reason, Task, Verdict

HELD = Decision(Verdict.HELD)


def task(task_id: str) -> Task:
    return Task(task_id, "a", 3, 0.0, 30.0, 30.0, 1, LocalPlan())


def device(seed: int = 0, **settings: Any) -> Session:
    return Session("a", seed, SessionSettings(retry_base_s=1.0, retry_cap_s=1e6, **settings))


def asked(effects: list[ef.SessionEffect]) -> str:
    (ask,) = [e for e in effects if isinstance(e, ef.AskTask)]
    return ask.task_id


def trained(session: Session, task_id: str) -> ef.Push:
    """From the grant of a task to the push of its result."""
    session.handle(ev.TaskGranted(0.0, task(task_id)))
    return pushed(session)


def pushed(session: Session) -> ef.Push:
    session.handle(ev.ModelFetched(0.0))
    assert session.update_id is not None
    (push,) = session.handle(ev.Trained(0.0, session.update_id))
    assert isinstance(push, ef.Push)
    return push


def pause_s(effects: list[ef.SessionEffect]) -> float:
    return next(e.at for e in effects if isinstance(e, ef.SetTimer) and e.name == "retry")


def lost(session: Session, task_id: str) -> list[ef.SessionEffect]:
    """The result came, and its task had ended."""
    trained(session, task_id)
    return session.handle(ev.CallFailed(0.0, "task is not open", retryable=False))


def flawed(session: Session, task_id: str) -> list[ef.SessionEffect]:
    session.handle(ev.TaskGranted(0.0, task(task_id)))
    return session.handle(ev.CallFailed(0.0, "the loss is NaN", retryable=False, flawed=True))


def given_up(session: Session, task_id: str) -> list[ef.SessionEffect]:
    session.handle(ev.TaskGranted(0.0, task(task_id)))
    return session.handle(ev.CallFailed(0.0, "unknown codec", retryable=False))


@pytest.mark.parametrize(
    ("fail", "doublings_max"),
    [(lost, LOST_MAX), (flawed, FLAWED_MAX), (given_up, 8)],
    ids=lambda x: str(x)[:16],
)
def test_the_pauses_double_up_to_a_bound(
    fail: Callable[[Session, str], list[ef.SessionEffect]], doublings_max: int
) -> None:
    """Full jitter: between nothing and a second, doubled so often as it has failed in a row."""

    def pauses(seed: int) -> list[float]:
        session, found = device(seed), []
        task_id = asked(session.handle(ev.Started(0.0)))
        for _ in range(7):
            found.append(pause_s(fail(session, task_id)))
            task_id = asked(session.handle(ev.TimerFired(0.0, "retry")))
        return found

    rows = [pauses(seed) for seed in range(200)]
    for number, column in enumerate(zip(*rows, strict=True), 1):
        most = 2.0 ** min(number, doublings_max)
        assert 0.9 * most < max(column) <= most


def test_the_bounds_of_the_pauses() -> None:
    assert (LOST_MAX, FLAWED_MAX) == (4, 3), "16 and 8 times the base, which is half a second"


@pytest.mark.parametrize("fail", [lost, flawed, given_up])
def test_an_answered_update_ends_the_doubling(fail: Callable[[Session, str], list[ef.SessionEffect]]) -> None:
    latest = 0.0
    for seed in range(50):
        session = device(seed)
        task_id = asked(session.handle(ev.Started(0.0)))
        for _ in range(4):
            fail(session, task_id)
            task_id = asked(session.handle(ev.TimerFired(0.0, "retry")))
        update_id = trained(session, task_id).update_id
        task_id = asked(session.handle(ev.PushAcknowledged(0.0, update_id, HELD)))
        latest = max(latest, pause_s(fail(session, task_id)))
    assert 1.0 < latest <= 2.0


def test_what_is_lost_and_what_is_flawed_are_counted_apart() -> None:
    session = device()
    task_id = asked(session.handle(ev.Started(0.0)))
    lost(session, task_id)
    assert (session.lost, session.flaws, session.failures) == (1, 0, 1)
    trained(session, asked(session.handle(ev.TimerFired(0.0, "retry"))))
    session.handle(ev.CallFailed(0.0, "not finite", retryable=False, flawed=True))
    assert (session.lost, session.flaws, session.failures) == (0, 1, 1), "a flaw is an answer, however told"
    update_id = trained(session, asked(session.handle(ev.TimerFired(0.0, "retry")))).update_id
    invalid = Decision(Verdict.REJECTED, reason=Reason.INVALID)
    session.handle(ev.PushAcknowledged(0.0, update_id, invalid))
    assert (session.lost, session.flaws, session.failures) == (0, 2, 2)


# --- with the push --------------------------------------------------------------------------------


def pushing(**settings: Any) -> tuple[Session, ef.Push]:
    session = device(ask_with_push=True, **settings)
    return session, trained(session, asked(session.handle(ev.Started(0.0))))


def test_a_push_asks_for_the_next_task_which_its_answer_brings() -> None:
    session, push = pushing()
    assert push.next_task_id not in ("", session.task.task_id if session.task else "")
    effects = session.handle(ev.PushAcknowledged(5.0, push.update_id, HELD, task(push.next_task_id)))
    assert [type(e) for e in effects] == [ef.Discard, ef.SetTimer, ef.FetchModel]
    assert (session.phase, session.task) == (Phase.FETCHING, task(push.next_task_id))
    again = pushed(session)
    assert again.update_id != push.update_id
    assert again.next_task_id != push.next_task_id


def test_a_push_that_is_repeated_asks_for_the_same_task() -> None:
    session, push = pushing()
    session.handle(ev.CallFailed(0.0, "no answer", retryable=True))
    assert session.handle(ev.TimerFired(1.0, "retry")) == [push]


@pytest.mark.parametrize("answer", [None, "another"])
def test_without_that_task_in_the_answer_it_is_asked_for_by_its_id(answer: str | None) -> None:
    session, push = pushing()
    granted = None if answer is None else task(answer)
    effects = session.handle(ev.PushAcknowledged(0.0, push.update_id, HELD, granted))
    assert effects == [ef.Discard(push.update_id), ef.AskTask(push.next_task_id)]
    assert trained(session, push.next_task_id).next_task_id not in ("", push.next_task_id)


def test_the_last_push_asks_for_nothing() -> None:
    session, push = pushing(tasks_max=2)
    assert push.next_task_id
    session.handle(ev.PushAcknowledged(0.0, push.update_id, HELD, task(push.next_task_id)))
    last = pushed(session)
    assert last.next_task_id == ""
    effects = session.handle(ev.PushAcknowledged(0.0, last.update_id, HELD))
    assert effects == [ef.Discard(last.update_id), ef.Stop("2 tasks done")]


def test_what_an_earlier_life_has_left_goes_first() -> None:
    session = device(ask_with_push=True)
    first = session.handle(ev.Started(0.0, "u-1", ("u-2", "u-3")))
    assert first == [ef.Push("u-1", "")]
    assert session.handle(ev.PushAcknowledged(0.0, "u-1", HELD)) == [ef.Discard("u-1"), ef.Push("u-2", "")]
    discard, push = session.handle(ev.PushAcknowledged(0.0, "u-2", HELD))
    assert isinstance(push, ef.Push)
    assert (discard, push.update_id) == (ef.Discard("u-2"), "u-3")
    assert push.next_task_id, "nothing is behind it"


def test_a_session_by_itself_goes_by_these_settings() -> None:
    assert Session("a", 1).settings == SessionSettings(0.5, 60.0, 0, 1, ask_with_push=False)


def test_a_result_that_is_refused_for_good_costs_none_of_those_behind_it() -> None:
    session = device(ask_with_push=True)
    session.handle(ev.Started(0.0, "u-1", ("u-2", "u-3")))
    refused = session.handle(ev.CallFailed(0.0, "task is not open", retryable=False))
    assert refused == [ef.Discard("u-1"), ef.Push("u-2", "")]
    flawed = session.handle(ev.CallFailed(0.0, "not finite", retryable=False, flawed=True))
    assert flawed[0] == ef.Discard("u-2")
    assert isinstance(flawed[1], ef.Push)
    assert flawed[1].update_id == "u-3"


def test_a_flawed_result_is_one_of_the_tasks_that_are_done_and_a_lost_one_is_none() -> None:
    for is_flawed, left in ((True, [ef.Stop("1 tasks done")]), (False, [])):
        session = device(tasks_max=1)
        trained(session, asked(session.handle(ev.Started(0.0))))
        effects = session.handle(ev.CallFailed(0.0, "not taken", retryable=False, flawed=is_flawed))
        assert [e for e in effects if isinstance(e, ef.Stop)] == left
        assert session.answered == is_flawed


def test_whatever_succeeds_ends_the_doubling_of_failed_calls() -> None:
    """A failed call then waits for two seconds at most, whichever call it is."""

    def fail(session: Session, times: int) -> float:
        for _ in range(times):
            effects = session.handle(ev.CallFailed(0.0, "no route", retryable=True))
            session.handle(ev.TimerFired(0.0, "retry"))
        return pause_s(effects)

    for seed in range(20):
        session = device(seed)
        session.handle(ev.Started(0.0))
        fail(session, 9)
        session.handle(ev.TaskRefused(0.0, (0.0, 1.0), "full"))
        task_id = asked(session.handle(ev.TimerFired(0.0, "retry")))
        assert fail(session, 1) <= 2.0
        session.handle(ev.TaskGranted(0.0, task(task_id)))
        fail(session, 9)
        push = pushed(session)
        assert fail(session, 1) <= 2.0
        fail(session, 9)
        session.handle(ev.PushAcknowledged(0.0, push.update_id, HELD))
        assert session.failures == 0
        assert fail(session, 1) <= 2.0
