"""A device that trains its next task while the result of the last one is on its way.

    work lane   asking --> fetching --> training --> asking ...       "pushing" here: no room, it waits
                                            |                          for the push lane
    push lane                               +--> waiting results --> push --> answered
                                                       +-- backs off --+

The lanes share nothing but the room: the server knows of at most `tasks_held_max` tasks of a device (its
`server.tasks_per_client`), of one at work and of those whose results are unanswered; beyond that, asking
would give the oldest one up. So a task that failed is given back before the next one is asked for, and
after a restart, when the server may know of a task that nobody works at, what was left is pushed first.
Results are pushed one at a time, oldest first, the same bytes each time.
Pure, as `Session` is: two calls may be in flight, one a lane, and a failed push names its update.
"""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.device.session import Phase, Session, SessionSettings
from anabranch.core.model.updates import FLAWS, Task

PUSH_TIMER = "push"


@dataclass(frozen=True)
class Unanswered:
    """A result in the outbox. Without a task it is of an earlier life."""

    update_id: str
    task: Task | None = None


class OverlapSession(Session):
    """A device in two lanes: it trains its next task while earlier results are on their way.

    `phase`, `task` and `update_id` are the work lane's; `unanswered` is the other's.
    """

    def __init__(self, client_id: str, seed: int, settings: SessionSettings | None = None) -> None:
        super().__init__(client_id, seed, settings)
        self.unanswered: list[Unanswered] = []
        self._push_failures = 0
        self._push_waits = False
        self._ending = ""

    def handle(self, event: ev.SessionEvent) -> list[ef.SessionEffect]:
        """Take one event, return the effects in order. What comes too late is ignored."""
        if self.phase is Phase.STOPPED:
            return []
        match event:
            case ev.Trained(now, update_id) if self.phase is Phase.TRAINING and update_id == self.update_id:
                return self._trained(now)
            case ev.PushAcknowledged():
                return self._acknowledged(event)
            case ev.CallFailed(update_id=str()):
                return self._push_failed(event)
            case ev.CallFailed() if self.phase is Phase.PUSHING:
                return []
            case ev.TimerFired(now, "push"):
                return self._push_again(now)
            case ev.TimerFired(now, "heartbeat") if held := self._held():
                return [*(ef.Renew(task) for task in held), self._heartbeat(now)]
        return super().handle(event)

    # --- the push lane -----------------------------------------------------------------------

    def _started(self, event: ev.Started) -> list[ef.SessionEffect]:
        first = event.pending_update_id
        found = () if first is None else (first, *event.later_update_ids)
        self.unanswered, self._push_waits = [Unanswered(update_id) for update_id in found], False
        return [*self._push_first(), *self._ask_anew(event.now)]

    def _trained(self, now: float) -> list[ef.SessionEffect]:
        assert self.update_id is not None
        idle = not self.unanswered
        self.unanswered.append(Unanswered(self.update_id, self.task))
        self.given_up = 0
        return [*(self._push_first() if idle else []), *self._ask_next(now)]

    def _push_first(self) -> list[ef.SessionEffect]:
        return [ef.Push(self.unanswered[0].update_id)] if self.unanswered else []

    def _acknowledged(self, event: ev.PushAcknowledged) -> list[ef.SessionEffect]:
        if not self._is_first(event.update_id):
            return []
        self._judged(flawed=event.decision.reason in FLAWS)
        return self._answered(event.now, event.update_id, counts=True)

    def _is_first(self, update_id: str) -> bool:
        return bool(self.unanswered) and self.unanswered[0].update_id == update_id

    def _answered(self, now: float, update_id: str, counts: bool) -> list[ef.SessionEffect]:
        """The first result is settled for good: the next one goes, and the work lane has room."""
        self.unanswered.pop(0)
        self._push_failures, self._push_waits = 0, False
        self.answered += counts
        effects: list[ef.SessionEffect] = [ef.Discard(update_id), *self._push_first()]
        if self.settings.tasks_max and self.answered >= self.settings.tasks_max:
            return [*effects, *self._stop(f"{self.answered} tasks done")]
        if self._ending and not self.unanswered:
            return [*effects, *self._stop(self._ending)]
        return [*effects, *(self._ask_next(now) if self.phase is Phase.PUSHING else [])]

    def _push_failed(self, event: ev.CallFailed) -> list[ef.SessionEffect]:
        assert event.update_id is not None
        if self._push_waits or not self._is_first(event.update_id):
            return []
        if not event.retryable:  # the server does not want this one
            self._unwanted(event)
            return self._answered(event.now, event.update_id, counts=event.flawed)
        self._push_failures += 1
        self._push_waits = True
        return [
            ef.SetTimer(PUSH_TIMER, self._backed_off(event.now, self._push_failures, event.retry_after_s))
        ]

    def _push_again(self, now: float) -> list[ef.SessionEffect]:  # noqa: ARG002
        if not self._push_waits:
            return []
        self._push_waits = False
        return self._push_first()

    # --- the work lane -----------------------------------------------------------------------

    def _ask_next(self, now: float) -> list[ef.SessionEffect]:
        return super()._ask_next(now) if self._has_room() else self._ask_anew(now)

    def _ask_anew(self, now: float) -> list[ef.SessionEffect]:
        """Ask where there is room for a task, else wait for an answer to a push."""
        if self._has_room():
            return super()._ask_anew(now)
        self.task, self.update_id, self.phase = None, None, Phase.PUSHING
        return []

    def _has_room(self) -> bool:
        s, waiting = self.settings, len(self.unanswered)
        wanted = not s.tasks_max or self.answered + waiting < s.tasks_max
        ours = all(unanswered.task is not None for unanswered in self.unanswered)
        return wanted and ours and not self._ending and waiting < s.tasks_held_max

    def _failed(self, event: ev.CallFailed) -> list[ef.SessionEffect]:
        task = self.task
        effects = super()._failed(event)
        gone = task is not None and self.task is None and not event.flawed  # then it is given back already
        return [*([ef.GiveBack(task.task_id, event.detail)] if task and gone else []), *effects]

    def _refused(self, event: ev.TaskRefused) -> list[ef.SessionEffect]:
        if not (event.final and self.unanswered):
            return super()._refused(event)
        self._ending, self.task, self.phase = event.detail, None, Phase.PUSHING
        return []

    # --- time --------------------------------------------------------------------------------

    def _held(self) -> list[Task]:
        """The tasks whose leases are kept: of results on their way, and the one at work, which is last."""
        found = [u.task for u in self.unanswered if u.task is not None]
        return found if self.task is None else [*found, self.task]

    def _heartbeat(self, now: float) -> ef.SetTimer:
        return self._beat(now, min(task.lease_s for task in self._held()))
