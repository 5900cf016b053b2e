"""The server side of a simulation: the same engine as live, its journal, and the record of the run.

`server.py` calls `enrol`, `ask`, `push` and `renew` at the virtual moment at which the server handles them;
what time that is to the server's own clocks `server_time.py` says. The record of the run has the virtual
time. As on a live server an ask that would be refused changes nothing and is not journalled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from anabranch.compress.model import full_bytes
from anabranch.core import events as ev
from anabranch.core.config.tables import Config
from anabranch.core.effects import Decided, Effect, Finished, Granted, Published, Refused
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.waiting import WaitingLine
from anabranch.core.errors import (
    AnabranchError,
    AppError,
    ConfigError,
    IdTaken,
    InvalidUpdate,
    StoreFull,
    UnknownTask,
    WireError,
)
from anabranch.core.journal import to_record
from anabranch.core.limits import RETRY_FULL_DISK_S
from anabranch.core.model.metrics import finite
from anabranch.core.model.updates import Ask, Capability, Decision, Task, Verdict
from anabranch.core.secagg.ring import Numbers
from anabranch.host.log import Data, Journal
from anabranch.host.records import RunReporter
from anabranch.host.run import Advice, Run, advice
from anabranch.host.secagg import mask_sum_arrived
from anabranch.host.submission import announced, answered, arrived, check_coming, check_size, examined
from anabranch.reports.recorder import Recorder
from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.disk import Disk
from anabranch.simulation.server_time import ServerTime
from anabranch.simulation.storage import FinishedUpdate
from anabranch.simulation.versions import Offer, Versions
from anabranch.simulation.waiting_room import Sleeper, WaitingRoom

Observer = Callable[[ev.Event, Sequence[Effect]], None]
# An operator's: `Paused`, `Resumed`, `Quarantined` or `Released`, of the time at which it is handled.
Order = Callable[[float], ev.Event]


class World:
    """A simulated server: engine, journal and record of the run, in virtual time.

    Observers see every engine event with its effects, after it was handled; `refused` are told of every ask
    without a task, most of which are no event; `invalid` of whose update could not be used, and why;
    `vanished` of each device that goes, whatever it was at.

    After a crash there is another engine: `restarted` are told of it, and `taken_back`, before, if it is of
    an earlier event: of which one. With a `room` refused devices sleep in it, without one they stand in the
    live server's line. `config` has the bounds, and the rules of that line. `salt`: of an update, by its id.
    """

    def __init__(
        self,
        clock: VirtualClock,
        engine: Engine,
        versions: Versions,
        journal: Journal,
        recorder: Recorder,
        downlink_at: Callable[[int], str],
        room: WaitingRoom | None = None,
        time: ServerTime | None = None,
        config: Config | None = None,
        salt: Callable[[str], str] = lambda _: "",
    ) -> None:
        config = config or Config()
        self._limits = limits = config.limits
        self._line = partial(WaitingLine, limits, config.server.lapsed, config.server.windows)
        self.clock, self.time = clock, time or ServerTime(clock)
        self.host = Run(engine, self._line() if room is None else room, limits)
        self.versions = versions
        self.room = room
        self.observers: list[Observer] = []
        self.refused: list[Callable[[Refused], None]] = []
        self.rejected: list[Callable[[Decided], None]] = []
        self.invalid: list[Callable[[str, str], None]] = []
        self.vanished: list[Callable[[str], None]] = []
        self.taken_back: list[Callable[[Engine, int], None]] = []
        self.restarted: list[Callable[[Engine], None]] = []
        self.whole: AbstractContextManager[object] = nullcontext()  # what nothing may come between
        self._journal, self._salt = journal, salt
        self.disk = journal if isinstance(journal, Disk) else None
        self._turn = 0
        self._recorder = recorder
        self._full_bytes = full_bytes(engine.spec)
        self._teller = RunReporter(recorder, downlink_at)
        self._tick_at = math.inf

    @property
    def engine(self) -> Engine:
        """That of the server's present life."""
        return self.host.engine

    # --- what the devices say ----------------------------------------------------------------

    def enrol(self, client_id: str, capability: Capability) -> ConfigError | None:
        """A device makes itself known, or hears why the run has nothing for it."""
        try:
            self._handle(ev.Enrolled(self.time.now(), client_id, capability))
        except AppError:
            raise  # a strategy's, not the device's
        except ConfigError as error:
            self._recorder.unfit(self.clock.now, client_id, str(error))
            return error
        return None

    def ask(self, ask: Ask) -> Refused | tuple[Task, Offer]:
        """A task and the model it starts from, or why there is none."""
        effects = self._handle(ev.TaskAsked(self.time.now(), ask))
        answer = effects[-1]  # after what the device gives up by asking
        if isinstance(answer, Refused):
            for hear in self.refused:
                hear(answer)
            return answer
        assert isinstance(answer, Granted), "an ask is granted or refused"
        task = answer.task
        offer = self.versions.offer(ask.holds, task.submodel)
        if self.disk is not None and self.disk.takes_back:
            offer = self.versions.named(offer, ask.holds, task.submodel, self.disk.head_of)
        return task, offer

    def drop(self, client_id: str, task_id: str, why: str, diverged: bool = False) -> None:
        """A device gives a task back."""
        self._handle(ev.TaskDropped(self.time.now(), client_id, task_id, why, diverged))
        if diverged:
            self._heard_invalid(client_id, why)

    def push(self, client_id: str, done: FinishedUpdate) -> Decision | AnabranchError:
        """What becomes of an update whose last byte is here; an error where a live server answers so."""
        result, task, spec = done.result, done.task, self.engine.spec
        try:
            submission = announced(
                spec,
                update_id=done.update_id,
                task_id=task.task_id,
                client_id=client_id,
                base_version=task.base_version,
                examples=done.examples,
                local_steps=result.steps,
                metrics=finite(result.metrics),
                sha256=done.sha256(),
                size_bytes=len(result.payload),
                codec=result.codec,
                submodel=task.submodel,
                base_head=done.base_head,
            )
            found = examined(submission, result.payload, spec, self._limits)
            head = None if self.disk is None else self.disk.head_of(task.base_version)
            event = arrived(submission, found, self.time.now(), head, salt=self._salt(done.update_id))
            decided = answered(event, self._handle(event, result.payload))
        except (InvalidUpdate, IdTaken) as error:
            if isinstance(error, InvalidUpdate):
                self._heard_invalid(client_id, str(error))
            return error
        decision = decided.receipt.decision
        if decision.verdict is Verdict.REJECTED and not decided.duplicate:
            for hear in self.rejected:
                hear(decided)
        return decision

    def _heard_invalid(self, client_id: str, why: str) -> None:
        for hear in self.invalid:
            hear(client_id, why)

    def objection(self, client_id: str, done: FinishedUpdate) -> AnabranchError | None:
        """Why a payload shall not come: it is not as its task wants it, or for one that is over."""
        task, codec = done.task, done.result.codec
        try:
            check_size(len(done.result.payload), codec, self.engine.spec, task.submodel)
            check_coming(self.engine, client_id, task.task_id, done.update_id, codec)
        except UnknownTask as error:
            self._recorder.note(self.clock.now, "late", client=client_id, update=done.update_id)
            return error
        except WireError as error:
            return error
        return None

    def renew(self, client_id: str, task_id: str, progress: float, session: str = "") -> Advice:
        """A heartbeat, and what its device should know."""
        self._handle(ev.LeaseRenewed(self.time.now(), client_id, task_id, progress, session))
        return advice(self.engine, client_id, task_id)

    def order(self, order: Order) -> list[Effect]:
        """What an operator wants; returns what came of it."""
        return self._handle(order(self.time.now()))

    def mask_sum(self, number: int, keeper: str, numbers: Numbers) -> list[Effect]:
        """What a keeper answers for a cohort; returns what came of it."""
        cohorts = self.engine.cohorts
        assert cohorts is not None, "keepers answer in runs with masked sums"
        return self._handle(*mask_sum_arrived(cohorts.terms, self.time.now(), number, keeper, numbers))

    def downloaded(self, client_id: str, payload_bytes: int, frozen_bytes: int = 0) -> None:
        """A device has received a model, or what leads to it from the one it had, and what is frozen."""
        whole = self._full_bytes + frozen_bytes
        self._recorder.downloaded(self.clock.now, client_id, payload_bytes + frozen_bytes, whole)

    def gone(self, client_id: str) -> None:
        """A device has vanished, which the server does not see."""
        self._recorder.note(self.clock.now, "vanished", client=client_id)
        for hear in self.vanished:
            hear(client_id)
        if self.room is not None:
            self.room.leave(client_id, self.clock.now)

    def waits(self, refused: Refused, device: Sleeper) -> bool:
        """Whether a device that was just refused shall sleep until it is called, or ask again by itself."""
        return self.room is not None and self.room.takes(refused, device)

    def turns_away(self, newcomer: Sleeper) -> bool:
        """Whether a device that asks for its first task is refused, and sleeps until it is called.

        So `ask` and `waits` would have it: who never had a task gives none up by asking, and a refusal
        changes nothing else; nor was it called, whose place a refusal would give to another. Most asks of a
        large fleet are such. False: it has to ask.
        """
        if self.room is None:
            return False
        ask = Ask(newcomer.client_id, "")  # a task id matters only where it is known
        refused = self.room.refusal(self.engine, ask, self.time.now())
        if refused is None or not self.room.takes(refused, newcomer):
            return False
        for hear in self.refused:
            hear(refused)
        return True

    # --- the engine --------------------------------------------------------------------------

    def acknowledge(self) -> None:
        """Everybody may hear of what was handled so far."""
        if self.disk is not None:
            self.disk.acknowledge()

    def stop(self) -> None:
        """The process is gone: no lease ends by itself until `restart`."""
        self._tick_at = math.inf

    def restart(self) -> None:
        """Go on with the engine that the disk holds. Raises what `Disk.rebuild` does."""
        self._come_back()
        if self.engine.ledger.live:
            self._handle(ev.Returned(self.time.now()))
            self.acknowledge()
        self._plan_tick()

    def settle(self) -> None:
        """The run is over: it came to what a backup has that was put back, though nobody serves it yet."""
        if self.disk is not None and self._turn != self.disk.turn:
            self._come_back()

    def _come_back(self) -> None:
        assert self.disk is not None, "only a run with faults has a disk"
        applied = self.engine.counters.applied
        self.host = Run(self.disk.rebuild(self.engine), self._line(), self._limits)
        self.versions.engine = self.engine
        self.time.restart(self.disk.last_now)
        if self._turn != self.disk.turn:
            self._turn = self.disk.turn
            self.versions.go_back()
            for tell_where in self.taken_back:
                tell_where(self.engine, self.disk.seq)
            counters = self.engine.counters
            lost = applied - counters.applied
            self._recorder.taken_back(self.clock.now, self.engine.version, lost, counters.left_out)
        for tell in self.restarted:
            tell(self.engine)

    def _handle(self, message: ev.Event, payload: Data | None = None) -> list[Effect]:
        with self.whole:
            done = self.host.take(message, lambda event: self._journal.append(to_record(event), payload))
            part = message.update.submodel if isinstance(message, ev.UpdateArrived) else None
            self._teller.tell(self.clock.now, self.host.engine, done.effects, part)
            if done.event is not None:  # else it is an answer, which changes nothing
                self._handled(done.event, done.effects)
            return done.effects

    def _handled(self, event: ev.Event, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Published(version) if self.disk is not None:
                    self.disk.published(version)
                case Finished():
                    self.clock.stop()
        if self.room is not None and not self.clock.is_stopped:  # else nobody would come: it is over
            self.room.call(event)
        for observe in self.observers:
            observe(event, effects)
        if self.disk is not None:
            self.disk.save_if_due(self.engine)
        self._plan_tick()

    def _plan_tick(self) -> None:
        due = self.host.engine.next_deadline()
        if due is None:
            return
        at = self.time.moment(due)
        if at < self._tick_at:
            self._tick_next(at)

    def _tick_next(self, at: float) -> None:
        self._tick_at = at
        self.clock.at(at, lambda: self._tick(at))

    def _tick(self, planned_at: float) -> None:
        if planned_at != self._tick_at:
            return  # an earlier tick was planned after this one
        self._tick_at = math.inf
        ticked = self.host.tick(self.time.now())
        if ticked is None:
            self._plan_tick()
            return
        try:
            self._handle(ticked)
        except StoreFull:
            self._tick_next(self.clock.now + RETRY_FULL_DISK_S)
        else:
            self.acknowledge()
