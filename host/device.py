"""The shell round a device's session: what its orders ask for, and what becomes of what they bring back.

`Session` decides what is next; what a refusal, a result, an error or an advice means for the device, and what
then stays on its disk, is here, once. The live agent and the simulated device are both one: they have a
clock, a wire, a disk and a trainer, and carry out the orders by these, at once or in another thread. What
comes of an order is told to one of the methods in the middle.

    order                 the driver's      what comes of it
    AskTask               `_ask`            `_answered` with a task or a refusal
    FetchModel            `_fetch`          `_fetched`
    Train                 `_train`          `_trained`, once the result is on the disk
    Push                  `_push`           `_acknowledged`
    any of these                            `_failed`
    Renew                 `_renew`          `_noticed`, if there is a notice
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import StrEnum

from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.device.session import Session
from anabranch.core.errors import AnabranchError, InvalidUpdate, WireError, outcome_of
from anabranch.core.model.updates import Decision, Reason, Task, Verdict
from anabranch.host.run import AdviceKind

OVER = (AdviceKind.CANCEL, AdviceKind.FINISHED)  # nobody wants the task any more


class DeviceCall(StrEnum):
    """What a device does that may fail."""

    ASK = "ask"
    FETCH = "fetch"
    TRAIN = "train"
    PUSH = "push"


class DeviceShell(ABC):
    """A device round its session: carries out the orders, and tells it what came of them.

    `now` is the device's own time, in seconds.
    """

    __slots__ = ()  # a simulation has a million of them
    session: Session

    # --- the driver's ------------------------------------------------------------------------

    @property
    @abstractmethod
    def _now(self) -> float:
        """What its clock shows."""

    @abstractmethod
    def _order(self, effect: ef.SessionEffect, now: float) -> None:
        """See to it that an order is obeyed (`_obey`): at once, in its turn, or in another thread."""

    @abstractmethod
    def _enrol(self, then: Callable[[], None]) -> None:
        """Say who it is, until the server has heard it; then go on."""

    @abstractmethod
    def _ask(self, task_id: str, now: float) -> None: ...
    @abstractmethod
    def _fetch(self, task: Task) -> None: ...
    @abstractmethod
    def _train(self, order: ef.Train) -> None: ...
    @abstractmethod
    def _push(self, order: ef.Push) -> None: ...
    @abstractmethod
    def _renew(self, task: Task, now: float) -> None: ...
    @abstractmethod
    def _give_back(self, order: ef.GiveBack, now: float) -> None: ...
    @abstractmethod
    def _set_timer(self, timer: ef.SetTimer) -> None: ...

    @abstractmethod
    def _stop_work(self, task_id: str) -> None:
        """Neither the task's model nor its result is waited for any more."""

    @abstractmethod
    def _end(self, why: str) -> None:
        """The session has ended."""

    @abstractmethod
    def _advised(self) -> None:
        """The server wants what there is: of use to a device that trains on."""

    @abstractmethod
    def _unwanted(self, task_id: str) -> None:
        """Nobody wants this task: see to it that `_cancelled` is called, in a thread that may."""

    # What is on its disk.

    @abstractmethod
    def _waiting(self) -> Sequence[str]:
        """The results that no server has answered yet, oldest first."""

    @abstractmethod
    def _commit(self, update_id: str) -> None:
        """The server has taken this result: what its uplink remembers with it counts from now on."""

    @abstractmethod
    def _discard(self, update_id: str) -> None:
        """This result is over; what its uplink would remember with it too, unless that counts."""

    @abstractmethod
    def _forget(self) -> None:
        """What its uplink remembers is of no use: the training has diverged."""

    # --- orders ------------------------------------------------------------------------------

    def _hear(self, event: ev.SessionEvent) -> None:
        """Tell the session, and see to what it wants."""
        for effect in self._handle(event):
            self._order(effect, event.now)

    def _handle(self, event: ev.SessionEvent) -> list[ef.SessionEffect]:
        return self.session.handle(event)

    def _obey(self, effect: ef.SessionEffect, now: float) -> None:  # noqa: C901 - one flat table
        """Carry out an order of the moment `now`, or begin to."""
        match effect:  # what refused asks lead to comes first: most orders of a large fleet
            case ef.SetTimer():
                self._set_timer(effect)
            case ef.AskTask(task_id):
                self._ask(task_id, now)
            case ef.FetchModel(task) | ef.Train(task) if task is not self.session.task:
                return  # it was cancelled before its turn came
            case ef.FetchModel(task):
                self._fetch(task)
            case ef.Train():
                self._train(effect)
            case ef.Push():
                self._push(effect)
            case ef.Discard(update_id):
                self._discard(update_id)
            case ef.Renew(task):
                self._renew(task, now)
            case ef.GiveBack():
                self._give_back(effect, now)
            case ef.StopTraining(task_id):
                self._stop_work(task_id)
            case ef.Stop(why):
                self._end(why)

    # --- what comes of them ------------------------------------------------------------------

    def _begin(self) -> None:
        """It starts: what an earlier life has left goes first."""
        waiting = self._waiting()
        self._hear(ev.Started(self._now, waiting[0] if waiting else None, tuple(waiting[1:])))

    def _answered(self, answer: Task | ef.Refused, now: float) -> None:
        """An ask has its answer. Whom the server does not know, as the end of its log was lost, enrols."""
        if isinstance(answer, Task):
            self._hear(ev.TaskGranted(now, answer))
        elif answer.reason is Reason.UNKNOWN_CLIENT:
            self._enrol(lambda: self._refused(answer, self._now))
        else:
            self._refused(answer, now)

    def _refused(self, answer: ef.Refused, now: float) -> None:
        self._hear(ev.TaskRefused(now, answer.retry_after_s, answer.detail, answer.final))

    def _fetched(self) -> None:
        """What the task starts from is here."""
        self._hear(ev.ModelFetched(self._now))

    def _trained(self, update_id: str) -> None:
        """The result is on the disk."""
        self._hear(ev.Trained(self._now, update_id))

    def _acknowledged(
        self,
        update_id: str,
        decision: Decision,
        task: Task | None = None,
        tell: Callable[[], object] = lambda: None,
    ) -> None:
        """A result has its verdict, for good; `task` was asked for with it; `tell` who wants to hear."""
        if decision.verdict is not Verdict.REJECTED:
            self._commit(update_id)
        tell()
        self._hear(ev.PushAcknowledged(self._now, update_id, decision, task))

    def _failed(
        self, call: DeviceCall, error: AnabranchError, update_id: str | None = None, again: bool | None = None
    ) -> None:
        """A call came to nothing; `again`: whether it may be repeated, if not as the error says."""
        if call is DeviceCall.TRAIN and isinstance(error, InvalidUpdate):
            self._forget()
        flawed = call in (DeviceCall.TRAIN, DeviceCall.PUSH) and isinstance(error, WireError)
        retryable = outcome_of(error).retryable if again is None else again
        window_s = error.retry_after_s
        self._hear(ev.CallFailed(self._now, str(error), retryable, window_s, update_id, flawed))

    def _noticed(self, task_id: str, notice: str) -> None:
        """The answer to a heartbeat for this task has a notice."""
        if notice == AdviceKind.UPLOAD_NOW:
            self._advised()
        elif notice in OVER:
            self._unwanted(task_id)

    def _cancelled(self, task_id: str) -> None:
        """Work at this task ends; a result of it that is on its way is the server's to decide."""
        self._hear(ev.TaskCancelled(self._now, task_id))
