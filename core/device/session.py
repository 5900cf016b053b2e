"""The device machine, the engine's twin: ask, fetch, train, push, and back off when told to.

    idle --> asking --> fetching --> training --> pushing --> asking ...
               |           |                        |
               +-----------+------ waiting ---------+      (backs off, then repeats the same call)

Pure: `handle(event)` returns effects; the live agent and the simulated device both obey it. One call
is in flight at a time, heartbeats apart. Ids come from the seed, so a repeated call has the same id.

Backing off: full jitter, U(0, min(cap, base * 2^n)) after the n-th failure in a row; a retry window
that the server sent wins. While what it trained cannot be used, it backs off before each ask likewise, but
for some seconds at most where its tasks had ended before the results came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.backoff import backed_off_s
from anabranch.core.model.updates import FLAWS, Task
from anabranch.core.rng import rank, unique_id

HEARTBEATS_PER_LEASE = 3
HEARTBEAT_JITTER = 0.1
LOST_MAX = 4  # doublings for results whose tasks had ended
FLAWED_MAX = 3  # and for those that were of no use: the server counts them, to say that the run has diverged


class Phase(StrEnum):
    """Where the device stands."""

    IDLE = "idle"
    ASKING = "asking"
    FETCHING = "fetching"
    TRAINING = "training"
    PUSHING = "pushing"
    WAITING = "waiting"
    STOPPED = "stopped"


IN_FLIGHT = (Phase.ASKING, Phase.FETCHING, Phase.TRAINING, Phase.PUSHING)


@dataclass(frozen=True)
class SessionSettings:
    """Seconds. `tasks_max`: stop after so many answered updates (0: never).

    `tasks_held_max`: tasks of which the server may know at a time, see `overlap`. `ask_with_push`: a
    push asks for the next task, so that this starts from the very version that the update made.
    """

    retry_base_s: float = 0.5
    retry_cap_s: float = 60.0
    tasks_max: int = 0
    tasks_held_max: int = 1
    ask_with_push: bool = False


class Session:
    """A device as a machine without clock or wire: events in, orders out.

    All attributes are for reading; only `handle` changes them.
    """

    # A simulation has one for each device, and may have a million of them.
    __slots__ = (
        "_again",
        "_asks",
        "_draws",
        "_later",
        "_next_task_id",
        "_task_id",
        "answered",
        "client_id",
        "failures",
        "flaws",
        "given_up",
        "lost",
        "phase",
        "seed",
        "settings",
        "task",
        "update_id",
    )

    def __init__(self, client_id: str, seed: int, settings: SessionSettings | None = None) -> None:
        self.client_id = client_id
        self.seed = seed
        self.settings = settings or SessionSettings()
        self.phase = Phase.IDLE
        self.task: Task | None = None
        self.update_id: str | None = None
        self.answered = 0
        self.failures = 0
        self.given_up = 0
        self.flaws = 0  # results in a row that could not be used
        self.lost = 0  # results in a row whose tasks had ended
        self._asks = 0
        self._draws = 0
        self._task_id = self._next_task_id = ""
        self._later: tuple[str, ...] = ()  # what an earlier life has left, behind the update in hand
        self._again: Call = Session._ask

    def handle(self, event: ev.SessionEvent) -> list[ef.SessionEffect]:  # noqa: C901 - one flat table
        """Take one event, return the effects in order. What comes too late is ignored."""
        if self.phase is Phase.STOPPED:
            return []
        match event:  # refused asks come first: most of what a large fleet hears
            case ev.TaskRefused() if self.phase is Phase.ASKING:
                return self._refused(event)
            case ev.TimerFired(now, "retry") if self.phase is Phase.WAITING:
                return self._again(self, now)
            case ev.TimerFired(now, "heartbeat") if self.task is not None:
                return [ef.Renew(self.task), self._heartbeat(now)]
            case ev.Started():
                return self._started(event)
            case ev.TaskGranted(_, task) if self.phase is Phase.ASKING and task.task_id == self._task_id:
                return self._granted(event)
            case ev.ModelFetched(now) if self.phase is Phase.FETCHING:
                return self._train(now)
            case ev.Trained(now, update_id) if self.phase is Phase.TRAINING and update_id == self.update_id:
                return self._push(now)
            case ev.PushAcknowledged(_, update_id) if update_id == self.update_id:
                return self._acknowledged(event)
            case ev.CallFailed() if self.phase in IN_FLIGHT:
                return self._failed(event)
            case ev.TaskCancelled(now, task_id) if self.task is not None and task_id == self.task.task_id:
                return self._cancelled(now)
        return []

    # --- the calls ---------------------------------------------------------------------------

    def _ask_next(self, now: float) -> list[ef.SessionEffect]:
        """Ask for the next task: at once, unless the last one has come to nothing."""
        if not (self.flaws or self.lost):
            return self._ask_anew(now)
        self.task = self.update_id = None
        self.failures = max(min(self.flaws, FLAWED_MAX), min(self.lost, LOST_MAX))
        return self._wait(now, Session._ask_anew, None)

    def _ask_anew(self, now: float) -> list[ef.SessionEffect]:
        self.task = self.update_id = None
        self._task_id, self._next_task_id = self._next_task_id or self._fresh_task_id(), ""
        return self._ask(now)

    def _fresh_task_id(self) -> str:
        self._asks += 1
        return _task_id(self.seed, self.client_id, self._asks)

    def _ask(self, now: float) -> list[ef.SessionEffect]:  # noqa: ARG002
        self.phase = Phase.ASKING
        return [ef.AskTask(self._task_id)]

    def _fetch(self, now: float) -> list[ef.SessionEffect]:  # noqa: ARG002
        assert self.task is not None
        self.phase = Phase.FETCHING
        return [ef.FetchModel(self.task)]

    def _train(self, now: float) -> list[ef.SessionEffect]:  # noqa: ARG002
        assert self.task is not None
        self.phase, self.failures = Phase.TRAINING, 0
        self.update_id = unique_id(self.seed, "update", self.client_id, self._asks)
        return [ef.Train(self.task, self.update_id)]

    def _push(self, now: float) -> list[ef.SessionEffect]:  # noqa: ARG002
        assert self.update_id is not None
        self.phase = Phase.PUSHING
        last = self.settings.tasks_max and self.answered + 1 >= self.settings.tasks_max
        if self.settings.ask_with_push and not (self._later or last):
            self._next_task_id = self._next_task_id or self._fresh_task_id()
        return [ef.Push(self.update_id, self._next_task_id)]

    # --- the answers -------------------------------------------------------------------------

    def _started(self, event: ev.Started) -> list[ef.SessionEffect]:
        if event.pending_update_id is None:
            return self._ask_anew(event.now)
        self.update_id, self._later = event.pending_update_id, tuple(event.later_update_ids)
        return self._push(event.now)

    def _next(self, now: float) -> list[ef.SessionEffect]:
        """What an earlier life has left goes first, be it more than one; then a new task."""
        if not self._later:
            return self._ask_next(now)
        self.task, (self.update_id, *later) = None, self._later
        self._later = tuple(later)
        return self._push(now)

    def _granted(self, event: ev.TaskGranted) -> list[ef.SessionEffect]:
        self.task, self.failures = event.task, 0
        return [self._heartbeat(event.now), *self._fetch(event.now)]

    def _refused(self, event: ev.TaskRefused) -> list[ef.SessionEffect]:
        if event.final:
            return self._stop(event.detail)
        self.failures = 0
        return self._wait(event.now, Session._ask_anew, event.retry_after_s)

    def _acknowledged(self, event: ev.PushAcknowledged) -> list[ef.SessionEffect]:
        self._judged(flawed=event.decision.reason in FLAWS)
        return self._settled(event.now, event.task)

    def _settled(self, now: float, granted: Task | None = None) -> list[ef.SessionEffect]:
        """The update in hand is settled for good; `granted` was asked for with it."""
        assert self.update_id is not None
        discard = ef.Discard(self.update_id)
        self.answered, self.failures, self.given_up = self.answered + 1, 0, 0
        if self.settings.tasks_max and self.answered >= self.settings.tasks_max:
            return [discard, *self._stop(f"{self.answered} tasks done")]
        if granted is not None and granted.task_id == self._next_task_id:
            self._task_id, self._next_task_id, self.update_id = self._next_task_id, "", None
            return [discard, *self._granted(ev.TaskGranted(now, granted))]
        return [discard, *self._next(now)]

    def _failed(self, event: ev.CallFailed) -> list[ef.SessionEffect]:
        """Repeat a call that may succeed later; for one that cannot, give the task up."""
        self.failures += 1
        if event.retryable:
            again = CALLS.get(self.phase)
            if again is not None:
                return self._wait(event.now, again, event.retry_after_s)
        if self.phase is Phase.ASKING:
            return self._stop(event.detail)
        if self.phase is Phase.PUSHING and self.update_id:
            self._unwanted(event)
            if event.flawed:
                return self._settled(event.now)
            return [ef.Discard(self.update_id), *self._next(event.now)]
        diverged = [ef.GiveBack(self.task.task_id, event.detail, True)] if event.flawed and self.task else []
        self.task = self.update_id = None
        # A grant clears `failures`: without this, tasks that all fail would be asked for at full speed.
        self.given_up += 1
        self.failures = max(self.failures, min(self.given_up, FLAWED_MAX) if diverged else self.given_up)
        return [*diverged, *self._wait(event.now, Session._ask_anew, event.retry_after_s)]

    def _unwanted(self, event: ev.CallFailed) -> None:
        """A result was refused for good: for what it is, or for its task, which somebody may fight over.

        A flaw is told as an error the first time, and as a verdict where the result is sent again: both mean
        the same, so both count as an answer.
        """
        if event.flawed:
            self._judged(flawed=True)
        else:
            self.lost += 1

    def _judged(self, flawed: bool) -> None:
        """What the server thinks of a result: whether the next one is worth any hurry."""
        self.flaws, self.lost = self.flaws + 1 if flawed else 0, 0

    def _cancelled(self, now: float) -> list[ef.SessionEffect]:
        """Stop work that is not wanted; a finished result is still pushed, the server decides."""
        assert self.task is not None
        at_work = self.phase in (Phase.FETCHING, Phase.TRAINING) or self.update_id is None
        if not at_work:
            return []
        return [ef.StopTraining(self.task.task_id), *self._ask_anew(now)]

    def _stop(self, why: str) -> list[ef.SessionEffect]:
        self.phase, self.task = Phase.STOPPED, None
        return [ef.Stop(why)]

    # --- time --------------------------------------------------------------------------------

    def _wait(
        self,
        now: float,
        again: Call,
        window_s: tuple[float, float] | None,
    ) -> list[ef.SessionEffect]:
        self.phase, self._again = Phase.WAITING, again
        return [ef.SetTimer("retry", self._backed_off(now, self.failures, window_s))]

    def _backed_off(self, now: float, failures: int, window_s: tuple[float, float] | None) -> float:
        """When to repeat a call after so many failures in a row."""
        if window_s is None:
            settings = self.settings
            window_s = (0.0, backed_off_s(settings.retry_base_s, settings.retry_cap_s, failures))
        low, high = window_s
        return now + low + (high - low) * self._uniform()

    def _heartbeat(self, now: float) -> ef.SetTimer:
        assert self.task is not None
        return self._beat(now, self.task.lease_s)

    def _beat(self, now: float, lease_s: float) -> ef.SetTimer:
        jitter = 1.0 + HEARTBEAT_JITTER * (2.0 * self._uniform() - 1.0)
        return ef.SetTimer("heartbeat", now + jitter * lease_s / HEARTBEATS_PER_LEASE)

    def _uniform(self) -> float:
        self._draws += 1
        return rank(self.seed, "session", self.client_id, self._draws)


def first_task_id(seed: int, client_id: str) -> str:
    """Under which id the session of this seed asks for its first task."""
    return _task_id(seed, client_id, 1)


def _task_id(seed: int, client_id: str, number: int) -> str:
    return unique_id(seed, "task", client_id, number)


Call = Callable[[Session, float], list[ef.SessionEffect]]
CALLS: dict[Phase, Call] = {
    Phase.ASKING: Session._ask,
    Phase.FETCHING: Session._fetch,
    Phase.PUSHING: Session._push,
}
