"""The server machine: admission, leases, idempotency, staleness, versions. It calls the strategy.

Pure: `handle(event)` changes the state and returns effects; every event carries `now`. Equal
journals give equal digests. The engine is owned by a single writer. The driver makes an event
durable before it calls `handle`, and releases the effects after.

What is decided where: the engine computes staleness, here and nowhere else, and decides all that is
true of every method (who may hold a lease, what is a duplicate, what is too old); the strategy
decides what its paper decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from anabranch.core import events as ev
from anabranch.core.effects import (
    Barred,
    CohortLost,
    Decided,
    Effect,
    Finished,
    Granted,
    LeaseEnd,
    LeaseEnded,
    MaskSumWanted,
    Published,
    Refused,
    Reopened,
    RolledBackTo,
    Unbarred,
)
from anabranch.core.engine.admission import Application, superseded
from anabranch.core.engine.answers import checked_state, checked_task, checked_tick, checked_timer
from anabranch.core.engine.beforehand import Beforehand, LongPart
from anabranch.core.engine.broadcast import Broadcast, BroadcastState
from anabranch.core.engine.buffers import Buffers
from anabranch.core.engine.changes import Changes
from anabranch.core.engine.cohorts import Cohorts, WaitingCohort
from anabranch.core.engine.deadlines import Deadlines
from anabranch.core.engine.guard import Guard
from anabranch.core.engine.ledger import Counters, Ledger
from anabranch.core.engine.loan import Loan, Loans
from anabranch.core.engine.objections import objection, repeated
from anabranch.core.engine.outcome import outcome
from anabranch.core.engine.part_changes import PartChanges
from anabranch.core.engine.planner import (
    Applicant,
    Planner,
    PlannerState,
    ended,
    planned,
    started,
)
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.shelf import Shelf
from anabranch.core.engine.stepping import as_given, stepped
from anabranch.core.engine.strategy import (
    Context,
    State,
    Step,
    Strategy,
    Sums,
    held,
    may_publish,
    rejected,
)
from anabranch.core.errors import AppError
from anabranch.core.model.arrays import read_only
from anabranch.core.model.chains import chain_for
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.submodels import Submodel
from anabranch.core.model.updates import Ask, Reason, Receipt, Task, TaskState, Update, Verdict
from anabranch.core.rng import seed_of

NO_SUCH_SUM = "no honest updates have such a sum: one was out of bounds, or what a keeper answered is wrong"


class Engine:
    """A server as a machine without clock, disk or wire: events in, effects out, state that is data.

    All attributes are for reading; only `handle` changes them.
    """

    def __init__(
        self,
        spec: ParamSpec,
        strategy: Strategy,
        settings: EngineSettings,
        vector: Vector,
        broadcast: Broadcast | None = None,
        planner: Planner | None = None,
        sums: Sums | None = None,
        cohorts: Cohorts | None = None,
        *,
        own: bool = False,
        shelf: Shelf | None = None,
    ) -> None:
        """`own`: `vector` is nobody else's, so that the engine may write on it; else it makes a copy.

        `shelf`: where the strategy puts what its state only refers to.
        """
        self.spec = spec
        self.strategy = strategy
        self.settings = settings
        self.changes = Changes()
        self.version = 0
        self.vector: Vector = vector.astype(spec.vector_dtype, copy=not own)
        self._loans = Loans()
        self._whose = f"strategy {strategy.name!r}"
        self.state: State = self._checked_state(strategy.init(self.vector), "init")
        # With a lossy downlink the bases come from it, without one from the history.
        self.broadcast = broadcast
        self.broadcast_state: BroadcastState = None if broadcast is None else broadcast.init(self.vector)
        self.planner = planner
        self.planner_state: PlannerState = None if planner is None else started(planner, self.vector)
        self.sums = sums
        self.cohorts = cohorts
        self.shelf = shelf
        self.part_changes = PartChanges()
        self.in_parts: bool = getattr(planner, "of_tensors", False)  # tasks may be of some whole tensors
        self.buffers = Buffers(spec, settings.buffers, self.vector)
        self.history: dict[int, Vector] = {}
        self.ledger = Ledger(settings.receipts_max, getattr(planner, "times_steps", False))
        self.guard = Guard()
        self.pending: list[str] = []
        self.counters = Counters()
        self.paused, self.finished = False, ""
        self.deadlines = Deadlines(self.ledger)

    # --- the machine -------------------------------------------------------------------------

    def handle(self, event: ev.Event, beforehand: Beforehand | None = None) -> list[Effect]:
        """Take one event, return the effects in order. `beforehand`: its `long_part`, if that was made."""
        match event:
            case ev.TaskAsked():
                return self._asked(event)
            case ev.UpdateArrived():
                return self._arrived(event, beforehand)
            case ev.LeaseRenewed():
                return self._renewed(event)
            case ev.Ticked():
                return self._ticked(event.now)
            case ev.Enrolled():
                self.ledger.enrol(event.client_id, event.capability)
            case ev.TaskDropped():
                return self._dropped(event)
            case _:
                return self._ordered(event)
        return []

    @property
    def offered(self) -> int:
        """The newest version that devices get: what the next task starts from."""
        if self.broadcast is None:
            return self.version
        return self.broadcast.offered(self.broadcast_state, self.version)

    def refusal(self, ask: Ask, now: float, ahead: int = 0) -> Refused | None:
        """Why this ask would get no task now, or None. Changes nothing, so it needs no journal.

        `ahead`: devices that come first, so that as many more are as good as in training.
        """
        found = Application(ask, now, self).refusal(ahead)
        if found is None:
            return None
        return Refused(ask, found.reason, found.detail, self.settings.retry_after_s, bool(self.finished))

    def lend(self) -> Loan:
        """The vector of the newest version; the engine does not write on it as long as the loan is held."""
        return self._loans.lend(self.vector)

    def staleness(self, of: Update | Task) -> int:
        """How many versions have changed what an update covers, or one of a task will, since its base."""
        return self.part_changes.staleness(of.submodel, self.version - of.base_version)

    def base(self, version: int) -> Vector | None:
        """The model that devices have of a version, for reading; None where it is not held any more."""
        if self.broadcast is not None:
            return self.broadcast.replica(self.broadcast_state, version)
        return self.vector if version == self.version else self.history.get(version)

    def next_deadline(self) -> float | None:
        """When a `Ticked` event is due: the earliest lease end or timer of the strategy."""
        ends, timer = self.deadlines.earliest(), self.timer()
        return ends if timer is None else timer if ends is None else min(ends, timer)

    def receipt(self, update_id: str, task_id: str) -> Receipt | None:
        """The receipt of an update, or of the update that used up the task."""
        return self.ledger.receipts.get(update_id) or self.ledger.receipt_of_task(task_id)

    # --- asks --------------------------------------------------------------------------------

    def _asked(self, event: ev.TaskAsked) -> list[Effect]:
        ask, now = event.ask, event.now
        if refused := self.refusal(ask, now):
            return [refused]
        if task := self.ledger.tasks.get(ask.task_id):
            return [Granted(task, again=True)]
        effects = [e for t in superseded(ask, self) for e in self._lose(t, LeaseEnd.SUPERSEDED, now)]
        local = self.settings.local
        found = self.strategy.plan(self.state, ask, local, self.context(now))
        plan = checked_task(found, self._whose, self.strategy.state_type, local)
        self.state = plan.state
        submodel = self._submodel(ask)
        client = self.ledger.clients[ask.client_id]
        lease_s = self.settings.lease_of(client.task_s_ewma)
        task = Task(
            task_id=ask.task_id,
            client_id=ask.client_id,
            base_version=self.offered,
            granted_at=now,
            expires_at=now + lease_s,
            lease_s=lease_s,
            seed=seed_of(self.settings.seed, "task", ask.client_id, self.counters.granted),
            local=plan.local,
            uplink=self._uplink_for(ask.client_id, plan.uplink),
            submodel=submodel,
        )
        self.counters.granted += 1
        self.guard.granted(ask.client_id, now, self.settings)
        self.ledger.open(task)
        self.deadlines.add(task)
        return [*effects, Granted(task)]

    def _submodel(self, ask: Ask) -> Submodel | None:
        """The part of the model that the next task is of; without a planner the whole."""
        if self.planner is None:
            return None
        seed = seed_of(self.settings.seed, "submodel", ask.client_id, self.counters.granted)
        client, open_tasks = self.ledger.clients[ask.client_id], len(self.ledger.live_of(ask.client_id))
        turn = client.accepted + client.rejected + open_tasks
        slowness, step_time = self.ledger.slowness(ask.client_id), self.ledger.step_time(ask.client_id)
        width_max = client.capability.width_max
        rules = self.settings.rules
        applicant = Applicant(slowness, self.version, seed, ask.client_id, turn, step_time, width_max, rules)
        found = planned(self.planner, self.planner_state, self.vector, applicant, self.spec)
        self.planner_state, submodel = found
        return submodel

    # --- updates -----------------------------------------------------------------------------

    @property
    def keeps_updates(self) -> bool:
        """Whether its strategy does: then whoever takes them in may make their deltas `lasting`."""
        return bool(getattr(self.strategy, "keeps_updates", False))  # there are older ones of others

    def long_in(self, now: float) -> int:
        """Which one of the next updates, at least, has a long part; 0: none."""
        long_in = getattr(self.strategy, "long_in", None)  # there are older ones of others
        return 0 if long_in is None or self.cohorts is not None else long_in(self.state, self.context(now))

    def long_part(self, event: ev.UpdateArrived) -> LongPart | None:
        """What takes long of this update, if it were handled as things stand. Changes nothing."""
        update, task = event.update, self.ledger.tasks.get(event.update.task_id)
        context = self.context(event.now, update)
        known = update.update_id in self.ledger.receipts
        if known or event.flaw or not self.long_in(event.now) or objection(event, task, context, self):
            return None
        if self.strategy.needs_base:
            context = replace(context, base=self.base(update.base_version))
            if context.base is None:
                return None
        part = self.strategy.long_part(self.state, self.vector, update, context)
        if part is None:
            return None
        given = as_given(update, context, self, self.vector).update
        return LongPart(update.update_id, self.version, self.state, self.settings, lambda: part(given))

    def _arrived(self, event: ev.UpdateArrived, beforehand: Beforehand | None) -> list[Effect]:
        update = event.update
        if (known := self.ledger.receipts.get(update.update_id)) is not None:
            self.counters.duplicates += 1
            return [repeated(event, known)]
        task = self.ledger.tasks.get(update.task_id)
        context = self.context(event.now, update)
        if beforehand is not None and beforehand.part.fits(update.update_id, self):
            context = replace(context, beforehand=beforehand.made)
        step = self._step(event, task, context)
        assert step.decision is not None, f"{self.strategy.name}: a step must carry a decision"
        if self.in_parts and step.decision.verdict is not Verdict.REJECTED:
            self.part_changes = self.part_changes.taken(update.submodel)
        effects = self._take(step, update)
        receipt = Receipt(
            update_id=update.update_id,
            task_id=update.task_id,
            version=self.version,
            decision=step.decision,
            client_id=update.client_id,
            sha256=event.payload.sha256,
        )
        effects += self._settle(task, receipt, event)
        decided = Decided(
            client_id=update.client_id,
            receipt=receipt,
            examples=update.examples,
            # Of a private run's device nobody hears how its training went.
            metrics={} if self.settings.participations_max else update.metrics,
            payload=event.payload,
            raw_bytes=(event.payload.values or self.spec.size) * self.spec.vector_dtype.itemsize,
        )
        effects += self._close_cohort()
        return [decided, *effects, *self._after(effects, event.now)]

    def _step(self, event: ev.UpdateArrived, task: Task | None, context: Context) -> Step:
        """The strategy's step for a good update; a rejection, state untouched, for any other."""
        update = event.update
        decision = objection(event, task, context, self)
        if decision is not None:
            return Step(self._without(task, event), None, decision)
        if self.strategy.needs_base:
            base = self.base(update.base_version)
            if base is None:
                detail = f"the model of version {update.base_version} is not held any more: its lease ended"
                refused = rejected(context.staleness, Reason.BASE_GONE, detail)
                return Step(self._without(task, event), None, refused)
            context = replace(context, base=base)
        if self.cohorts is not None:
            return self._gathered(self.cohorts, event, context)
        if event.flaw:  # no objection: the run is private
            update = replace(update, delta=np.zeros(self.spec.size, self.spec.vector_dtype))
        return stepped(update, context, self, self._model_for_step(context))

    # --- masked sums -------------------------------------------------------------------------

    @property
    def given_up(self) -> bool:
        """Whether it ended for want of updates that could be used, and by no budget."""
        return bool(self.finished) and self.finished == self.guard.hopeless(self.settings)

    @property
    def ending(self) -> str:
        """Why nothing more is taken although the run goes on: the sums that wait will end it."""
        if self.cohorts is None or not self.cohorts.waiting:
            return ""
        return self.settings.spent(self.version + len(self.cohorts.waiting), self.counters.applied)

    @property
    def updates_lost(self) -> int:
        """Updates that were taken, and went with a masked sum of which no version was made."""
        if self.cohorts is None:
            return 0
        waiting = sum(len(cohort.members) for cohort in self.cohorts.waiting)
        return self.counters.applied - len(self.cohorts.members) - waiting - self.updates_summed

    @property
    def updates_summed(self) -> int:
        """Updates of which masked sums made versions, those that a rollback has left out since as well."""
        per_sum = 0 if self.cohorts is None else self.cohorts.terms.cohort
        return (self.version - self.counters.rollbacks) * per_sum

    @property
    def sums_lost(self) -> int:
        """Masked sums of which no version was made, and none will be."""
        if self.cohorts is None:
            return 0
        return self.cohorts.number - len(self.cohorts.waiting) - (self.version - self.counters.rollbacks)

    def _gathered(self, cohorts: Cohorts, event: ev.UpdateArrived, context: Context) -> Step:
        """A masked update is added to the cohort in the making; the strategy hears of the whole of it."""
        weight = cohorts.take(event, self.version)
        self.guard.taken(event.update.client_id, None, False, self.settings)
        return Step(self.state, None, held(context.staleness, weight))

    def _close_cohort(self) -> list[Effect]:
        closed = None if self.cohorts is None else self.cohorts.close(self.version)
        if closed is None:
            return []
        self.guard.published(self.settings)  # here it is cohorts that a device's shares are of
        return [MaskSumWanted(closed.number, closed.version, closed.members)]

    def _of_cohorts(self, event: ev.MaskSumArrived | ev.CohortDropped, cohorts: Cohorts) -> list[Effect]:
        """A keeper has answered, or nobody waits for it any more: publish what has waited for that."""
        effects: list[Effect] = []
        number = cohorts.number
        if isinstance(event, ev.MaskSumArrived):
            cohorts.answer(event.number, event.keeper, event.numbers)
        elif (dropped := cohorts.drop(event.number)) is not None:
            effects += self._lost(dropped, event.why)
            if cohorts.number > number:  # of one in the making, as where it is closed
                self.guard.published(self.settings)
        while (cohort := cohorts.ready()) is not None:
            effects += self._unmasked(cohort, cohorts, event.now)
        return [*effects, *self._after(effects, event.now)] if effects else []

    def _unmasked(self, cohort: WaitingCohort, cohorts: Cohorts, now: float) -> list[Effect]:
        """A version of a cohort's sum."""
        found = cohorts.sum_of(cohort)
        if found is None:
            return self._lost(cohort, NO_SUCH_SUM)
        total = found.astype(self.spec.vector_dtype)
        step = cohorts.step(self.state, self._donated(), total, self.context(now))
        return self._take(step, of=cohort.update_ids)

    def _lost(self, cohort: WaitingCohort, why: str) -> list[Effect]:
        ids = cohort.update_ids
        self.pending = [u for u in self.pending if u not in ids]
        return [CohortLost(cohort.number, ids, why)]

    def _lost_all(self, why: str, rules: int) -> list[Effect]:
        """Nothing of what was taken so far makes a version."""
        if self.cohorts is None:
            return []
        number, lost = self.cohorts.number, self.cohorts.drop_all()
        # Keepers count cohorts by their numbers, and what was closed before has had its own.
        if self.cohorts.number > number or (lost and rules < 4):
            self.guard.published(self.settings)
        return [e for cohort in lost for e in self._lost(cohort, why)]

    def _without(self, task: Task | None, event: ev.UpdateArrived) -> State:
        """The strategy's state when a task's update is of no use: the task is lost."""
        if self.finished or task is None or task.state is not TaskState.LEASED:
            return self.state
        if task.client_id != event.update.client_id:
            return self.state
        return self._state_without(task, event.now)

    def _settle(self, task: Task | None, receipt: Receipt, event: ev.UpdateArrived) -> list[Effect]:
        update, reason = event.update, receipt.decision.reason
        rejection = receipt.decision.verdict is Verdict.REJECTED
        self.counters.rejected += rejection
        self.counters.applied += not rejection
        owned = task is not None and task.client_id == update.client_id
        self.ledger.file(receipt, answers_task=owned and reason is not Reason.DUPLICATE_TASK)
        if task is None or not owned:
            return []
        self._close(task)
        self._tell_planner(task, applied=not rejection)
        self.ledger.finished_task(task, event.now, update, rejection)
        return self._flawed(update.client_id, reason, receipt.decision.detail, event.now)

    def _flawed(self, client_id: str, reason: Reason, detail: str, now: float) -> list[Effect]:
        """An update was not taken, or will not come: whether its client is to blame."""
        why = self.guard.flawed(client_id, reason, detail, len(self.ledger.clients), self.settings)
        return self._quarantined(client_id, why, now) if why else []

    # --- what operators order ----------------------------------------------------------------

    def _ordered(self, event: ev.Event) -> list[Effect]:
        match event:
            case ev.Paused() | ev.Resumed():
                self.paused = isinstance(event, ev.Paused)
            case ev.Quarantined():
                return self._quarantined(event.client_id, event.why, event.now)
            case ev.Released() if self.guard.release(event.client_id):
                return [Unbarred(event.client_id)]
            case ev.RolledBack():
                return self._rolled_back(event)
            case ev.Returned(now):
                for task in self.ledger.leased():
                    self._extend(task, now, task.progress)
            case ev.SettingsChanged():
                return self._set(event)
            case ev.MaskSumArrived() | ev.CohortDropped() if self.cohorts is not None:
                return self._of_cohorts(event, self.cohorts)
        return []

    def _set(self, event: ev.SettingsChanged) -> list[Effect]:
        """Go by other settings from now on: a run ends by them, or goes on after its end."""
        had_ended, before = bool(self.finished), self.settings
        self.changes, self.settings, told = self.changes.take(event, before)
        if event.rules:
            self.guard.rebound(before, self.settings, self._waiting(), event.now)
        ended = self._ended()
        if not had_ended:
            return [told, *ended]
        if not ended:
            found = self.strategy.reopened(self.state, self.ledger.holders)
            self.state = self._checked_state(found, "reopened")
        return [told] if ended else [told, Reopened()]

    def _quarantined(self, client_id: str, why: str, now: float) -> list[Effect]:
        """No task for this client any more; those that it has end."""
        self.guard.bar(client_id, why)
        for task in self.ledger.expired_of(client_id):
            self._close(task)
        live = self.ledger.live_of(client_id)
        return [Barred(client_id, why), *(e for t in live for e in self._lose(t, LeaseEnd.CANCELLED, now))]

    def _rolled_back(self, event: ev.RolledBack) -> list[Effect]:
        """Publish what the log gives without some clients, which go into quarantine."""
        found = outcome(event, self)
        why = f"a rollback to version {event.to_version} left its updates out"
        # Whoever is in quarantine already stays there for what put it there.
        known = self.guard.quarantined.keys() if event.rules > 1 else ()
        barred = [c for c in event.without if c not in known]
        effects = [e for c in barred for e in self._quarantined(c, why, event.now)]
        self.pending, self.guard.lengths = found.folded, found.lengths
        effects += self._lost_all(why, event.rules)
        effects += [e for task in found.in_doubt for e in self._lose(task, LeaseEnd.CANCELLED, event.now)]
        self.counters.rollbacks += 1
        if event.rules > 1:
            self.counters.left_out = found.left_out_total
        if event.rules > 3:
            self.guard.hold(self._waiting(), self.settings)  # they are of the new version
        state = self._checked_state(found.state, "shifted")
        effects += self._take(Step(state, found.vector), afresh=True)
        self.pending = found.pending
        if event.rules > 3:
            self.guard.hold(self._waiting(), self.settings)
        if self.in_parts:
            self.part_changes = found.part_changes
        self.buffers.bounds = found.bounds
        told = RolledBackTo(self.version, event.to_version, found.left_out, found.left_out_total)
        return [*effects, told]

    # --- leases ------------------------------------------------------------------------------

    def _renewed(self, event: ev.LeaseRenewed) -> list[Effect]:
        task = self.ledger.tasks.get(event.task_id)
        if task is None or task.client_id != event.client_id or task.state is not TaskState.LEASED:
            return []
        if event.progress > task.progress:  # a device that hangs must not hold a slot for ever
            self._extend(task, event.now, event.progress)
        return []

    def _extend(self, task: Task, now: float, progress: float) -> None:
        task = replace(task, expires_at=max(task.expires_at, now + task.lease_s), progress=progress)
        self.ledger.replace(task)
        self.deadlines.add(task)

    def _dropped(self, event: ev.TaskDropped) -> list[Effect]:
        task = self.ledger.tasks.get(event.task_id)
        if task is None or task.client_id != event.client_id:
            return []
        lost = self._lose(task, LeaseEnd.DROPPED, event.now)
        if not event.diverged or self.finished:
            return lost
        told = [LeaseEnded(task, LeaseEnd.DROPPED, event.why)] if lost else []
        return [*told, *self._flawed(event.client_id, Reason.INVALID, event.why, event.now), *self._ended()]

    def _ticked(self, now: float) -> list[Effect]:
        ended = self.deadlines.ended(now)
        effects = [e for task in ended for e in self._lose(task, LeaseEnd.EXPIRED, now)]
        timer = self.timer()
        if timer is not None and timer <= now:
            effects += self._fired(timer, now)
        return [*effects, *self._after(effects, now)]

    def timer(self) -> float | None:
        """When the strategy wants to be called next, in the run's seconds."""
        due = None if self.finished else self.strategy.timer(self.state)
        return None if due is None else checked_timer(due, self._whose)

    def _fired(self, due: float, now: float) -> list[Effect]:
        """The strategy's timer has come. One that stays where it is would come for ever: `AppError`."""
        strategy = self.strategy
        found = strategy.on_timer(self.state, self._donated(), self.context(now))
        step = checked_tick(found, self._whose, strategy.state_type, self.spec)
        effects = self._take(step) if step else []
        later = self.timer()
        if later is not None and later <= due:
            raise AppError(
                f"{self._whose}: after on_timer the timer is {later!r}, which has come: it was {due!r}; "
                "give a state of which it is later, or None"
            )
        return effects

    def _state_without(self, task: Task, now: float) -> State:
        """The strategy's state when a task is lost."""
        return self._checked_state(self.strategy.on_lost(self.state, task, self.context(now)), "on_lost")

    def _checked_state(self, found: State, method: str) -> State:
        return checked_state(found, f"{self._whose}: {method}", self.strategy.state_type)

    def _lose(self, task: Task, end: LeaseEnd, now: float) -> list[Effect]:
        """End a lease without an update; an expired task is remembered for a late one."""
        was_live = task.state is TaskState.LEASED
        if end is LeaseEnd.EXPIRED:
            self.ledger.replace(replace(task, state=TaskState.EXPIRED))
            self._forget_base(task.base_version)
        else:
            self._close(task)
        if not was_live:
            return []
        self._tell_planner(task, applied=False)
        self.counters.leases_lost += 1
        if not self.finished:
            self.state = self._state_without(task, now)
        return [LeaseEnded(task, end)]

    def _tell_planner(self, task: Task, applied: bool) -> None:
        if self.planner is not None and (applied or task.state is TaskState.LEASED):
            version = self.version if applied else None
            self.planner_state = ended(self.planner, self.planner_state, task.submodel, version)

    def _close(self, task: Task) -> None:
        self.ledger.close(task)
        self._forget_base(task.base_version)

    # --- versions ----------------------------------------------------------------------------

    def context(self, now: float, update: Update | None = None, *, live_tasks: int | None = None) -> Context:
        """What it knows at a moment, and of an update that has come. `live_tasks`: as `AdmissionView`."""
        return Context(
            now,
            self.version,
            self.settings.seed,
            self.ledger.client_ids,
            live_tasks=self.ledger.live if live_tasks is None else live_tasks,
            staleness=0 if update is None else self.staleness(update),
            spec=self.spec,
            slowness=self.ledger.slowness,
            sums=self.sums,
            part_changes=self.part_changes,
            uplink_for=self._uplink_for,
            shelf=self.shelf,
            rules=self.settings.rules,
        )

    def _uplink_for(self, client_id: str, wanted: str) -> str:
        client = self.ledger.clients[client_id]
        return chain_for(client.capability.codecs, self.settings.uplink, wanted)

    def _model_for_step(self, context: Context) -> Vector:
        """The vector for the strategy's next step: one to write on only where the step may publish."""
        if may_publish(self.strategy, self.state, context):
            return self._donated(context.base)
        return read_only(self.vector)

    def _donated(self, base: Vector | None = None) -> Vector:
        """The vector for a strategy to write on: a copy where a live task may need the old one.

        One that is lent stays the borrower's, and the engine goes on with a copy.
        """
        is_base = self.keeps_history and self.ledger.bases.get(self.version)
        if is_base or base is self.vector:
            return self.vector.copy()
        if self._loans.holds(self.vector):
            self.vector = self.vector.copy()
        return self.vector

    def _take(
        self, step: Step, update: Update | None = None, afresh: bool = False, of: Sequence[str] | None = None
    ) -> list[Effect]:
        """Adopt the outcome of a strategy's call; a vector makes a version, `afresh` after a large step.

        `of`: the updates that it is made of, if not of all that wait.
        """
        self.state = step.state
        if update is not None and step.decision and step.decision.verdict is not Verdict.REJECTED:
            self.pending.append(update.update_id)
        if step.dropped:
            self.pending = [u for u in self.pending if u not in step.dropped]
        if step.vector is None:
            return []
        if self.keeps_history and self.ledger.bases.get(self.version):
            self.history[self.version] = self.vector
        self.vector = step.vector
        if not afresh:
            self.buffers.publish(self.vector)
        self.version += 1
        if self.in_parts:
            self.part_changes = self.part_changes.published()
        if self.sums is not None:
            self.sums.published(self.version)
        if self.cohorts is None:
            self.guard.published(self.settings)
        if self.broadcast is not None:
            publish = self.broadcast.restart if afresh else self.broadcast.publish
            self.broadcast_state = publish(self.broadcast_state, self.version, self.vector, self.ledger.bases)
        heard, folded = self._heard(step, update), tuple(self.pending if of is None else of)
        self.pending = [u for u in self.pending if u not in folded] if of is not None else []
        return [Published(self.version, self.vector, folded, heard)]

    def _heard(self, step: Step, newest: Update | None) -> tuple[tuple[str, float], ...]:
        """Whose updates of those that wait were heard how much, where a rule says so of each of them."""
        if len(step.heard) != len(self.pending):
            return ()
        senders = self._senders()
        senders |= {} if newest is None else {newest.update_id: newest.client_id}
        pairs = zip(self.pending, step.heard, strict=True)
        return tuple((senders[u], share) for u, share in pairs if u in senders)

    def _waiting(self) -> list[str]:
        """The clients of the updates that wait for the version in the making, or the next masked sum."""
        if self.cohorts is not None:
            return [member.client_id for member in self.cohorts.members]
        return list(self._senders().values())

    def _senders(self) -> dict[str, str]:
        """The client of each update that waits."""
        receipts = self.ledger.receipts
        return {u: receipts[u].client_id for u in self.pending if u in receipts}

    @property
    def keeps_history(self) -> bool:
        """Whether it has the vector of each version that an open task started from."""
        return self.strategy.needs_base and self.broadcast is None

    def _after(self, effects: list[Effect], now: float) -> list[Effect]:
        """What follows an update or a tick: stragglers of a round that ended, a used-up budget."""
        more: list[Effect] = []
        if self.strategy.is_synchronous(self.state) and any(isinstance(e, Published) for e in effects):
            for task in [t for t in self.ledger.tasks.values() if t.base_version < self.version]:
                more += self._lose(task, LeaseEnd.CANCELLED, now)
        return more if self.finished else [*more, *self._ended()]

    def _ended(self) -> list[Effect]:
        if self.cohorts is not None and self.cohorts.waiting:
            return []  # they are of updates that were taken
        spent = self.settings.spent(self.version, self.counters.applied) or self._given_all()
        self.finished = spent or self.guard.hopeless(self.settings)
        return [Finished(self.finished, self.given_up)] if self.finished else []

    def _given_all(self) -> str:
        """Why nothing can follow in a private run: too few of its devices may still give an update.

        Looked at after each version, since within one nothing of it changes.
        """
        most, needed = self.settings.participations_max, self._needed()
        if not needed or len(self.ledger.clients) < self.settings.fleet:
            return ""
        lately = {client_id for of in self.guard.folded for client_id in of}
        able = sum(c.accepted < most and i not in lately for i, c in self.ledger.clients.items())
        if able >= needed:
            return ""
        return f"the run ended at version {self.version}: [privacy] lets {able} devices give another update"

    def _needed(self) -> int:
        """How many updates of a private run the next sum needs; 0 where nothing is to be looked at now."""
        if self.cohorts is not None and self.settings.participations_max:
            return self.cohorts.terms.cohort - len(self.cohorts.members)
        return 0 if self.sums is None or self.guard.folded[-1] else self.sums.updates_needed

    def _forget_base(self, version: int) -> None:
        if version in self.history and not self.ledger.bases.get(version):
            del self.history[version]
