"""What any message to a run comes to, whoever carries it: devices' and operators', and time that passes.

`settle` says it before anything is logged: an answer, for what changes nothing needs no journal, or an event
for the log. Once that is durable, `apply` gives it to the engine. Who commits in batches settles them all,
writes the log, and applies them in order; `begin` says what is in a batch. `take` is for one by itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np

from anabranch.core import events as ev
from anabranch.core.effects import Conflicting, Effect, Published, Refused
from anabranch.core.engine.admission import dropped_by
from anabranch.core.engine.beforehand import Beforehand
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.objections import repeated
from anabranch.core.engine.planner import too_narrow
from anabranch.core.engine.rates import Rates
from anabranch.core.errors import AnabranchError, AppError, ConfigError, IdTaken, InvalidUpdate, Overloaded
from anabranch.core.kept_state import check_kept
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.updates import Ask, Receipt, Task, TaskState, is_finite
from anabranch.core.parts import is_looked_at
from anabranch.core.snapshot import Snapshot
from anabranch.core.unwritten import dataclass
from anabranch.host.second_look import check_alike, copied

BEATS_PER_LEASE = 10  # renewals that the log has at the most; a device sends three


class Waiting(Protocol):
    """Whose turn it is where places are few, and whose a device's tasks are where two run as one.

    As `core.engine.waiting.WaitingLine` has it: beside the engine, forgotten by a restart.
    """

    def begin(self) -> None:
        """A batch of messages begins: all that came before is decided, or could not be written."""
        ...

    def refusal(self, engine: Engine, ask: Ask, now: float) -> Refused | None:
        """Why this ask would get no task now, or None."""
        ...

    def renews(self, engine: Engine, task: Task, now: float) -> bool:
        """Whether a heartbeat may renew the lease of this task."""
        ...

    def beats(self, beat: ev.LeaseRenewed) -> None:
        """A heartbeat has come, of use or not."""
        ...

    def heard(self, now: float, effects: Iterable[Effect]) -> None:
        """Take note of what an event has come to."""
        ...


class NoLine:
    """Nobody waits: the driver itself says who asks."""

    def begin(self) -> None:
        """See `Waiting`."""

    def refusal(self, engine: Engine, ask: Ask, now: float) -> Refused | None:
        """The engine's."""
        return engine.refusal(ask, now)

    def renews(self, engine: Engine, task: Task, now: float) -> bool:  # noqa: ARG002
        """Nobody wants its place."""
        return True

    def beats(self, beat: ev.LeaseRenewed) -> None:
        """See `Waiting`."""

    def heard(self, now: float, effects: Iterable[Effect]) -> None:
        """See `Waiting`."""


@dataclass(slots=True)
class Settlement:
    """What a message comes to before anything is logged.

    `event`: for the log, None where the answer is known, which is `error` or `effects`. Beside an event the
    effects are what is answered besides those that it will have.
    """

    event: ev.Event | None = None
    effects: list[Effect] = field(default_factory=list)
    error: AnabranchError | None = None


class Run:
    """An engine and what stands before it: settles each message, and applies what is in the log.

    `old`: the receipt of an update that the engine has forgotten, where there is a log.
    """

    def __init__(
        self,
        engine: Engine,
        line: Waiting,
        limits: Limits = DEFAULT_LIMITS,
        old: Callable[[str], Receipt | None] = lambda _: None,
    ) -> None:
        self.engine, self.line = engine, line
        self.duplicates = 0  # updates that were answered from a stored verdict
        self._old = old
        self._coming: set[str] = set()  # the tasks of updates in the batch at hand
        self._beaten: set[str] = set()  # the tasks whose leases are renewed in it
        self._capabilities = Rates(limits.capabilities_per_hour / 60, limits.capabilities_per_hour)

    def take(self, message: ev.Event, log: Callable[[ev.Event], None] = lambda _: None) -> Settlement:
        """A message by itself: `log` makes what is for the log durable. Returns that, and all effects.

        Raises the error that the message comes to.
        """
        self.begin()
        settled = self.settle(message)
        if settled.error is not None:
            raise settled.error
        if settled.event is None:
            return settled
        log(settled.event)
        settled.effects = self.apply(settled)
        return settled

    def tick(self, now: float) -> ev.Ticked | None:
        """What is due by then: leases that end, a strategy's timer; None where nothing is."""
        due = self.engine.next_deadline()
        return ev.Ticked(now) if due is not None and due <= now else None

    def begin(self, events: Iterable[ev.Event] = ()) -> None:
        """A batch of these events is settled next; one by itself has none that come with it."""
        self.line.begin()
        self._beaten.clear()
        self._coming.clear()
        for event in events:
            if isinstance(event, ev.UpdateArrived):
                self._coming.add(event.update.task_id)

    def settle(self, event: ev.Event) -> Settlement:
        """What a message comes to before the log; nothing of the engine changes."""
        ledger = self.engine.ledger
        match event:
            case ev.Enrolled():
                return self._enrolled(event)
            case ev.TaskAsked():
                return self._asked(event)
            case ev.UpdateArrived(update=update) if update.update_id in ledger.receipts:
                return self.repeat(event)
            case ev.LeaseRenewed():
                changes = self._renews(event)
            case ev.TaskDropped(client_id=client_id, task_id=task_id):
                task = ledger.tasks.get(task_id)
                changes = task is not None and task.client_id == client_id
            case ev.Paused() | ev.Resumed():
                changes = self.engine.paused != isinstance(event, ev.Paused)
            case ev.Quarantined() | ev.Released():
                why = event.why if isinstance(event, ev.Quarantined) else None
                changes = self.engine.guard.quarantined.get(event.client_id) != why
            case ev.MaskSumArrived() | ev.CohortDropped():
                return self._of_cohort(event)
            case _:
                changes = True
        return Settlement(event if changes else None)

    def apply(self, settled: Settlement, beforehand: Beforehand | None = None) -> list[Effect]:
        """What becomes of an event that is in the log. `beforehand`: see `Engine.handle`."""
        assert settled.event is not None, "what is answered is not applied"
        applied, version = self.engine.counters.applied, self.engine.version
        model, twice = self._model_before(settled.event), self._taken_twice(settled.event)
        effects = [*self.engine.handle(settled.event, beforehand), *settled.effects]
        if self.engine.version != version:
            check_finite(self.engine, effects)
        counted = self.engine.counters.applied  # after one that was refused it stands still
        if counted > applied and is_looked_at(counted):  # what a state has may come later
            check_state(self.engine)
        if model is not None:
            self._check_model(*model, "on_timer" if isinstance(settled.event, ev.Ticked) else "a step")
        if twice is not None:
            check_alike(*twice, self.engine)
        self.line.heard(settled.event.now, effects)
        return effects

    def _model_before(self, event: ev.Event) -> tuple[int, int] | None:
        """The version and a checksum of its model before updates that are looked at, refused ones as well.

        And before timers that come meanwhile. Other ticks end leases alone: a large model takes long to read.
        """
        engine = self.engine
        number = engine.counters.applied + engine.counters.rejected + 1
        if not (is_looked_at(number) and self._gives_model(event)):
            return None
        return engine.version, zlib.crc32(engine.vector.data)

    def _taken_twice(self, event: ev.Event) -> tuple[Snapshot, ev.TaskAsked | ev.UpdateArrived] | None:
        """An ask or update that is looked at, with the state before it: see `host.second_look`."""
        counters = self.engine.counters
        if not isinstance(event, ev.TaskAsked | ev.UpdateArrived):
            return None
        asks = isinstance(event, ev.TaskAsked)
        number = 1 + (counters.granted if asks else counters.applied + counters.rejected)
        before = copied(self.engine) if is_looked_at(number) else None
        return None if before is None else (before, event)

    def _gives_model(self, event: ev.Event) -> bool:
        """Whether the strategy may get the model to write on."""
        if isinstance(event, ev.Ticked):
            due = self.engine.timer()
            return due is not None and due <= event.now
        return isinstance(event, ev.UpdateArrived)

    def _check_model(self, version: int, checksum: int, method: str) -> None:
        """Raises `AppError` where a version's model has changed: devices would have two of one number."""
        engine = self.engine
        if engine.version == version and zlib.crc32(engine.vector.data) != checksum:
            raise AppError(
                f"strategy {engine.strategy.name!r}: {method} changed `vector` and gave no version: devices "
                f"that fetch version {version} would not have the same: change a copy, or publish"
            )

    def repeat(self, event: ev.UpdateArrived) -> Settlement:
        """Answer an update whose id was decided before: `IdTaken` for another update than that."""
        update_id = event.update.update_id
        known = self.engine.ledger.receipts.get(update_id)
        if known is None or not known.sha256:
            known = self._old(update_id) or known
        assert known is not None, f"update {update_id} is in the log but has no verdict"
        effect = repeated(event, known)
        if isinstance(effect, Conflicting):
            return Settlement(error=IdTaken(effect.why))
        self.duplicates += 1
        return Settlement(effects=[effect])

    def _enrolled(self, said: ev.Enrolled) -> Settlement:
        """Who says nothing new of itself is known; who says something new without end has to wait.

        A device enrols once before it has looked at its data, at every start: no number of examples is none
        that is new. Who has no memory for any of the run's tasks hears so now, and not when it asks for one.
        """
        if why := too_narrow(self.engine.planner, said.capability.width_max):
            return Settlement(error=ConfigError(why))
        client = self.engine.ledger.clients.get(said.client_id)
        if client is None:
            return Settlement(said)
        if not said.capability.examples:
            known = client.capability.examples
            said = replace(said, capability=replace(said.capability, examples=known))
        if client.capability == said.capability:
            return Settlement()
        wait_s = self._capabilities.take(said.client_id, said.now)
        if not wait_s:
            return Settlement(said)
        why = f"{said.client_id!r} enrols with another capability too often: wait"
        return Settlement(error=Overloaded(why, (wait_s, 2 * wait_s)))

    def _asked(self, asked: ev.TaskAsked) -> Settlement:
        """An ask that gets no task now changes nothing; that it gives another up is an event for the log."""
        refused = self.line.refusal(self.engine, asked.ask, asked.now)
        if refused is None:
            return Settlement(asked)
        dropped = dropped_by(refused, asked.now, self.engine)
        if dropped is not None and dropped.task_id in self._coming:
            dropped = None
        return Settlement(dropped, [refused])

    def _of_cohort(self, event: ev.MaskSumArrived | ev.CohortDropped) -> Settlement:
        """What is of a cohort that nobody waits for changes nothing."""
        cohorts, changes = self.engine.cohorts, False
        if cohorts is not None and isinstance(event, ev.MaskSumArrived):
            changes = cohorts.wants(event.number, event.keeper)
            if changes and not cohorts.fits(event.numbers):
                return Settlement(error=InvalidUpdate(f"keeper {event.keeper} sent numbers of another size"))
        elif cohorts is not None:
            changes = cohorts.has(event.number)
        return Settlement(event if changes else None)

    def _renews(self, beat: ev.LeaseRenewed) -> bool:
        """Whether a heartbeat is of any use."""
        self.line.beats(beat)
        task = self.engine.ledger.tasks.get(beat.task_id)
        if task is None or (task.client_id, task.state) != (beat.client_id, TaskState.LEASED):
            return False
        if beat.progress <= task.progress or beat.task_id in self._beaten:
            return False
        more_s = beat.now + task.lease_s - task.expires_at
        hardly = task.progress and more_s < task.lease_s / BEATS_PER_LEASE
        if hardly or not self.line.renews(self.engine, task, beat.now):
            return False
        self._beaten.add(beat.task_id)
        return True


class AdviceKind(StrEnum):
    """What a device should know that has sent a heartbeat."""

    NONE = ""
    CANCEL = "cancel"  # the task is not wanted any more
    UPLOAD_NOW = "upload_now"  # what there is of it had better come soon
    FINISHED = "finished"  # the run has ended


@dataclass(frozen=True)
class Advice:
    """The answer to a heartbeat: when the lease ends (0: there is none), the newest version, and a notice."""

    expires_at: float
    version: int
    notice: AdviceKind = AdviceKind.NONE
    detail: str = ""


def advice(engine: Engine, client_id: str, task_id: str) -> Advice:
    """What a device with this task should know. An expired lease ends no work: a late update may count."""
    task, version = engine.ledger.tasks.get(task_id), engine.version
    if task is not None and task.client_id != client_id:
        task = None
    expires_at = 0.0 if task is None else task.expires_at
    if engine.finished:
        return Advice(expires_at, version, AdviceKind.FINISHED, engine.finished)
    if task is None:
        return Advice(0.0, version, AdviceKind.CANCEL, "the task is not wanted any more")
    if 0 < engine.settings.upload_now_versions <= engine.staleness(task):
        detail = f"version {version} is served, the task is of version {task.base_version}"
        return Advice(expires_at, version, AdviceKind.UPLOAD_NOW, detail)
    return Advice(expires_at, version)


def check_state(engine: Engine) -> None:
    """Raises `AppError` where a strategy's or planner's state is no data: soon, and at no snapshot first."""
    strategy, planner = engine.strategy, engine.planner
    check_kept(f"strategy {strategy.name!r}", engine.state, strategy.state_type, engine.vector)
    if planner is not None:
        check_kept(f"planner {planner.name!r}", engine.planner_state, planner.state_type, engine.vector)


def check_finite(engine: Engine, effects: Iterable[Effect]) -> None:
    """Raises `AppError` for a new version of which devices would refuse the model, and wait for ever."""
    for effect in effects:
        if isinstance(effect, Published) and not is_finite(effect.vector):
            first = int(np.flatnonzero(~np.isfinite(effect.vector))[0])
            strategy = getattr(engine.strategy, "strategy", engine.strategy)  # beside a scheduler
            rule = getattr(strategy, "rule", None)
            by = "" if rule is None else f" with robust rule {rule.name!r}"
            raise AppError(
                f"strategy {engine.strategy.name!r}{by}: version {effect.version} has values that are not "
                f"finite, the first in tensor {engine.spec.name_at(first)!r}: devices refuse such a model"
            )
