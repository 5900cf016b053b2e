"""The device agent: a device's shell (`host/device.py`) with a real clock, wire, disk and trainer.

The session (`core/device/session.py`) decides; its orders are carried out in the thread that calls `run`, but
for heartbeats, and for what goes on in the background: pushes (`client.push = "overlap"`) or training
(`elastic`). A result is in the outbox before it is sent: the agent may die at any moment, and go on from it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from anabranch.client.applications import Applications
from anabranch.client.disk import DeviceDisk
from anabranch.client.elastic import ElasticTrainer
from anabranch.client.held import HeldModels
from anabranch.client.lease import LeaseKeeper
from anabranch.client.messages import Enrolment, PushAnswer
from anabranch.client.neighbours import Neighbours
from anabranch.client.outbox import OutboxBounds, UpdateEntry
from anabranch.client.shadow import Order, SyncThread
from anabranch.client.state import fresh_seed, locked
from anabranch.client.stopping import Bell, Interrupted, interruptible, persist
from anabranch.client.summary import AgentSummary
from anabranch.client.telling import OnEvent, tell_failed
from anabranch.client.timers import Reachability, Timers
from anabranch.client.trainer import LocalTrainer
from anabranch.client.transport import Transport
from anabranch.client.trust import KeeperTrust
from anabranch.client.work import Work
from anabranch.compress.registry import BOUND_MASKING, MASKING
from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.config.ranges import ELASTIC, OVERLAP
from anabranch.core.config.tables import ClientTable, build
from anabranch.core.content import SHA256
from anabranch.core.device.overlap import PUSH_TIMER, OverlapSession
from anabranch.core.device.session import Phase, Session, SessionSettings
from anabranch.core.effects import Refused
from anabranch.core.engine.buffers import policy_of
from anabranch.core.errors import (
    AnabranchError,
    AppError,
    ConfigError,
    DataError,
    IdentityError,
    InvalidUpdate,
    ManifestMismatch,
    StoreError,
    Unavailable,
    outcome_of,
)
from anabranch.core.model.submodels import is_borne
from anabranch.core.model.updates import Capability, Reason, Task
from anabranch.host.device import DeviceCall, DeviceShell
from anabranch.support.tracing import answered, begun, span
from anabranch.workloads.app import App, Shard

log = logging.getLogger(__name__)

GOODBYE_S = 2.0  # in which a task is given back at the end: if not, its lease ends
NO_DATA, LOOK_AGAIN_S = "none of this device's examples is there yet", (1.0, 2.0)
# A server that does not know widths does not refuse it at its enrolment.
TOO_WIDE = "the server gives this device a wider task: install the same version of anabranch on both sides"
CALLS: dict[type[ef.SessionEffect], DeviceCall] = {
    ef.AskTask: DeviceCall.ASK,
    ef.FetchModel: DeviceCall.FETCH,
    ef.Train: DeviceCall.TRAIN,
    ef.Push: DeviceCall.PUSH,
}


class Agent(DeviceShell):
    """One device of a federation.

    `shard` says which part of the App's data is trained on, or how to find it out from the run that the
    server serves. `tasks_max`: stop after so many answered updates (0: never). `step_time_s`
    emulates a device that needs so long for a local step: after a training the agent rests until it
    has taken that long (0: no rest). A device that is slower by itself is not made faster. `width_max`: the
    share of the model's units that its memory bears, above 0; a run of whole models alone refuses it below 1.
    `seed` is for tests: ids come of it. `bell` has the clock and the sleep. `outbox`: what it holds at most.
    `threads`, `neighbours`: see `LocalTrainer`. `trust`: the keepers that it masks for.
    """

    def __init__(
        self,
        app: App,
        transport: Transport,
        client_id: str,
        shard: Shard | Callable[[Mapping[str, Any]], Shard],
        state_dir: Path,
        settings: ClientTable | None = None,
        *,
        tasks_max: int = 0,
        step_time_s: float = 0.0,
        width_max: float = 1.0,
        threads: int = 0,
        neighbours: Neighbours | None = None,
        seed: int | None = None,
        on_event: OnEvent | None = None,
        bell: Bell | None = None,
        outbox: OutboxBounds | None = None,
        trust: KeeperTrust | None = None,
    ) -> None:
        settings = settings or ClientTable()
        state_dir = state_dir.absolute()  # what an App does may change the working directory
        self.client_id = client_id
        self.summary = AgentSummary(client_id)
        self._transport, self._shard, self._state_dir = transport, shard, state_dir
        self._settings, self._step_time_s, self._width_max = settings, step_time_s, width_max
        self._seed = fresh_seed() if seed is None else seed
        self._on_event = on_event
        self._bell = bell or Bell(time.monotonic)
        self._local = LocalTrainer(app, settings, threads, client_id, neighbours)
        self._limits = SessionSettings(settings.retry_base_s, settings.retry_cap_s, tasks_max)
        self.session = Session(client_id, self._seed, self._limits)
        self._lock = threading.Lock()  # of the session
        self._todo: deque[tuple[ef.SessionEffect, float]] = deque()  # for the thread of `run`
        # Of this thread's calls, and of the sync thread's.
        self._reach, self._sync_reach = Reachability(), Reachability()
        self._timers = Timers(self._bell, lambda left_s: self._tell("waiting", seconds=left_s), self._reach)
        self._sync: SyncThread | None = None
        self._elastic: ElasticTrainer | None = None
        self._lease = LeaseKeeper(transport, self._beat, self._bell, self._tell)
        self._bounds, self._trust = outbox, trust or KeeperTrust()
        self._models = HeldModels(self._local, transport, state_dir, self._bell.now, self.summary, self._tell)
        self._fatal: AnabranchError | None = None
        self._ended = False  # the session may have, in another thread, and its last orders not
        self._applications = Applications(client_id, state_dir, self._seed)
        # Both are made once the folder is this process's own.
        self._disk: DeviceDisk
        self._work: Work

    def stop(self) -> None:
        """From any thread: end soon. A result in the outbox stays there for the next start."""
        self._bell.stop()

    def hasten(self) -> None:
        """From any thread: a server can be reached again. What was put off for that is due."""
        self._reach.returned()
        self._sync_reach.returned()
        if self._sync is not None:
            self._sync.look()
        self._bell.ring()

    def run(self) -> AgentSummary:
        """Work until the run ends, `tasks_max` is reached, `stop`, SIGTERM or SIGINT.

        Raises what makes going on senseless: `ManifestMismatch`, `AppError`, `DataError`, `IdentityError` and
        the like; `StoreError` where the folder was taken away.
        """
        with interruptible(self._bell):
            try:
                with locked(self._state_dir) as check_folder:
                    self._run(check_folder)
            except Interrupted as reason:
                self.summary.why = str(reason)
            finally:
                self._leave()
        self._tell("stopped", why=self.summary.why)
        if self._fatal is not None:
            raise self._fatal
        return self.summary

    def _run(self, check_folder: Callable[[], None]) -> None:
        self._disk = DeviceDisk(self._state_dir, self._bounds)
        self._work = Work(
            self._local,
            self._models,
            self._disk,
            self._lease,
            self._bell,
            self.summary,
            self._tell,
            self._check,
            self._step_time_s,
        )
        self._follow(self._enrolled(), self._work)
        self._lease.pulse.start()
        self._begin()
        while self._todo or not self._ended:
            self._check()
            check_folder()
            for task_id in self._lease.take_unwanted():
                self._cancelled(task_id)
            if self._todo:
                self._attempt(*self._todo.popleft())
            elif (timer := self._timers.due()) is not None:
                self._hear(ev.TimerFired(self._now, timer))

    def _check(self) -> None:
        """Raises what ends the agent: a stop, or an error in the sync thread."""
        self._bell.check()
        if self._sync is not None:
            self._sync.check()

    # --- the session -------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self._bell.now()

    def _handle(self, event: ev.SessionEvent) -> list[ef.SessionEffect]:
        with self._lock:
            return self.session.handle(event)

    def _follow(self, seen: Enrolment, work: Work) -> None:
        """Push as the run says."""
        table = seen.config.get("client", {})
        if table.get("push") == ELASTIC:
            self._elastic = ElasticTrainer(
                self._local, build(ClientTable, table, "client"), self._bell, self._step_time_s
            )
            work.trainer, work.step_time_s = self._elastic, 0.0  # the training itself takes that long
            limits = replace(self._limits, ask_with_push=True)
            self.session = Session(self.client_id, self._seed, limits)
        if table.get("push") == OVERLAP:
            held_max = int(seen.config.get("server", {}).get("tasks_per_client", 1))
            limits = replace(self._limits, tasks_held_max=held_max)
            self.session = OverlapSession(self.client_id, self._seed, limits)
            work.waits_for_room = True
            self._sync = SyncThread(self._carry, self._bell.now, self._bell.ring, self._sync_reach)
            self._sync.start()

    def _order(self, effect: ef.SessionEffect, now: float) -> None:
        """To each thread its orders."""
        match effect:
            case ef.Push() if self._sync is not None:
                self._sync.take(effect)
            case ef.SetTimer(name) if self._sync is not None and name == PUSH_TIMER:
                self._sync.take(effect)
            case ef.Discard() | ef.Renew() | ef.SetTimer("heartbeat"):
                self._obey(effect, now)
            case _:
                self._todo.append((effect, now))

    def _carry(self, order: Order) -> None:
        """In the sync thread."""
        match order:
            case ef.Push():
                self._attempt(order, self._now)
            case ef.SetTimer(name):
                self._hear(ev.TimerFired(self._now, name))
        self._bell.ring()

    def _attempt(self, order: ef.SessionEffect, now: float) -> None:
        """Carry out one order; a call that fails is told to the session, unless no other would end better."""
        call = CALLS.get(type(order))
        if call is None:
            self._obey(order, now)
            return
        reach = self._sync_reach if call is DeviceCall.PUSH and self._sync is not None else self._reach
        reach.begin()
        try:
            self._obey(order, now)
        except (AppError, DataError, IdentityError):
            self._bell.check()  # the signal may have struck the App's own processes, and it speaks of that
            # The next task would end like this one, and nothing is taken from this device as it is.
            raise
        except AnabranchError as error:
            if isinstance(error, Unavailable):
                reach.nobody()
            self._gone_wrong(call, error, order.update_id if isinstance(order, ef.Push) else None)

    def _gone_wrong(self, call: DeviceCall, error: AnabranchError, update_id: str | None) -> None:
        again = outcome_of(error).retryable
        with self._lock:
            self.summary.failures += 1
        whose = {"own_disk": True} if isinstance(error, StoreError) and error.own_disk else {}
        tell_failed(self._tell, call.value, error, again=again, **whose)
        if call in (DeviceCall.ASK, DeviceCall.FETCH) and isinstance(error, ManifestMismatch):
            self._enrolled()  # another run may be served there now: raises if its model is another, too
            again = True
        elif call is DeviceCall.ASK and not again:
            self._fatal = error
        elif call is DeviceCall.PUSH and not again:
            if isinstance(error, InvalidUpdate):
                self.summary.refused()
            log.warning("%s: it is given up", error)
        self._failed(call, error, update_id, again)

    # --- the wire ----------------------------------------------------------------------------

    def _enrol(self, then: Callable[[], None]) -> None:
        self._enrolled()
        then()

    def _enrolled(self) -> Enrolment:
        seen = persist(
            lambda: self._transport.enrol(self._capability()),
            self._bell,
            self._seed,
            self._settings.retry_base_s,
            self._settings.retry_cap_s,
            partial(tell_failed, self._tell, "enrol"),
        )
        self._local.join(seen.spec, seen.config)
        self._mask(seen)
        self._models.join(seen.run_id, seen.frozen_sha256, seen.first)
        self._disk.join(seen.run_id, seen.spec.layout_hash)
        if self._local.examples is None:  # find the data, and say how much it is
            self._local.load(self._shard if isinstance(self._shard, Shard) else self._shard(seen.config))
            return self._enrolled()
        counts = {"examples": len(self._local.examples)}
        if self._local.pool_examples:
            counts["examples_here"] = self._local.pool_examples
        self._tell("enrolled", run=seen.run, version=seen.version, **counts)
        return seen

    def _capability(self) -> Capability:
        found = replace(self._local.capability(), width_max=self._width_max)
        masking = (MASKING, BOUND_MASKING) if self._trust.keepers else ()
        return replace(found, codecs=(*found.codecs, *masking))

    def _mask(self, seen: Enrolment) -> None:
        """Mask what is sent where the run wants it. Raises as `KeeperTrust.check` does."""
        self._trust.check(seen.masking, seen.spec.size)
        if seen.masking is None:
            self._local.masker = None
            return
        from anabranch.client.masking import Masker  # the extra [secagg] alone has what it needs

        table = build(ClientTable, seen.config.get("client", {}), "client")
        self._local.masker = Masker(
            seen.masking,
            seen.run_id,
            self.client_id,
            table,
            buffers=policy_of(seen.config),
            layout_hash=seen.spec.layout_hash,
            frozen_sha256=seen.frozen_sha256,
        )

    def _ask(self, task_id: str, now: float) -> None:  # noqa: ARG002 - it is later by now
        begun(task_id)
        with span("ask", task_id, client=self.client_id):
            ask = self._applications.ask(task_id, self._models.holds)
            if self._local.waits_for_data:  # it refuses itself
                answer: Task | Refused = Refused(ask, Reason.NONE, NO_DATA, LOOK_AGAIN_S)
            else:
                answer = self._transport.ask(ask, self._local.spec)
        if isinstance(answer, Task):
            if not is_borne(answer.submodel, self._width_max):
                self._give_back(ef.GiveBack(answer.task_id, TOO_WIDE), self._now)
                raise ConfigError(f"width_max is {self._width_max:g}, and {TOO_WIDE}")
            self._lease.progress.begin()
            self._tell("granted", task=answer.task_id, base_version=answer.base_version)
        else:
            self._tell("refused", reason=answer.reason.value, detail=answer.detail)
            self.summary.run_ended = answer.final
        self._answered(answer, self._now)

    def _push(self, order: ef.Push) -> None:
        entry = self._disk.load(order.update_id)
        with span("push", entry.task_id, client=self.client_id, bytes=len(entry.payload)):
            try:
                answer = self._sent(entry, order.next_task_id)
            except InvalidUpdate:
                if not self._can_be_renamed(entry):
                    raise
                entry = self._disk.renamed(entry)
                answer = self._sent(entry, order.next_task_id)
        answered(entry.task_id, client=self.client_id, version=answer.version)
        self.summary.pushed(entry, answer, self._local.spec.vector_dtype.itemsize)
        task = answer.next if isinstance(answer.next, Task) else None
        if task is not None and not is_borne(task.submodel, self._width_max):
            self._give_back(ef.GiveBack(task.task_id, TOO_WIDE), self._now)
            task = None  # so it asks, and ends by the answer
        self._acknowledged(order.update_id, answer.decision, task, partial(self._tell_pushed, entry, answer))

    def _sent(self, entry: UpdateEntry, next_task_id: str | None) -> PushAnswer:
        if not next_task_id:
            return self._transport.push(entry)
        ask = self._applications.ask(next_task_id, self._models.holds)
        return self._transport.push_and_ask(entry, ask, self._local.spec)

    def _can_be_renamed(self, entry: UpdateEntry) -> bool:
        """Whether an update that was refused may be sent by its SHA-256: it is not decided yet.

        Another server may have taken the place of the one that offered a digest, without that, or of before.
        From now on none is named so, until this device enrols again.
        """
        if entry.algorithm == SHA256 or self._transport.query_upload(entry.update_id).answer is not None:
            return False
        self._local.payload_digest = SHA256
        return True

    def _tell_pushed(self, entry: UpdateEntry, answer: PushAnswer) -> None:
        decision = answer.decision
        self._tell(
            "pushed",
            update=entry.update_id,
            verdict=decision.verdict.value,
            staleness=decision.staleness,
            weight=decision.weight,
            reason=decision.reason.value,
            version=answer.version,
            duplicate=answer.duplicate,
            size_bytes=len(entry.payload),
        )
        if isinstance(answer.next, Task):
            self._tell("granted", task=answer.next.task_id, base_version=answer.next.base_version)

    def _beat(self) -> None:
        """In the heartbeats' thread."""
        self._hear(ev.TimerFired(self._now, "heartbeat"))

    def _renew(self, task: Task, now: float) -> None:  # noqa: ARG002 - it is now
        for notice in self._lease.renew(task):
            self._noticed(task.task_id, notice)

    def _unwanted(self, task_id: str) -> None:
        self._lease.end(task_id)

    def _advised(self) -> None:
        if self._elastic is not None:
            self._elastic.advise()

    def _give_back(self, order: ef.GiveBack, now: float) -> None:  # noqa: ARG002 - it is later by now
        try:
            self._transport.drop(order.task_id, order.why, order.diverged)
        except AnabranchError as error:
            log.info("task %s was not given back, its lease will end: %s", order.task_id, error)

    def _leave(self) -> None:
        """End the threads. What a server that is silent does not answer is not waited for long."""
        if self._sync is not None:
            self._sync.stop()
        if self._elastic is not None:
            self._elastic.stop()
        goodbye = threading.Thread(target=self._drop, args=(self._resultless(),), daemon=True)
        goodbye.start()
        self._lease.pulse.stop()
        goodbye.join(GOODBYE_S)

    def _resultless(self) -> Task | None:
        """At the end: a task without a result is of more use to another device."""
        task = self.session.task
        return None if task is None or self.session.update_id in self._disk.waiting() else task

    def _drop(self, task: Task | None) -> None:
        if task is not None:
            self._give_back(ef.GiveBack(task.task_id, self.summary.why or "the device stopped"), self._now)

    # --- the disk, the trainer, the timers ---------------------------------------------------

    def _waiting(self) -> Sequence[str]:
        return self._disk.waiting()

    def _commit(self, update_id: str) -> None:
        self._disk.commit(update_id)

    def _discard(self, update_id: str) -> None:
        self._disk.discard(update_id)

    def _forget(self) -> None:
        self._disk.forget()

    def _fetch(self, task: Task) -> None:
        with span("fetch", task.task_id, version=task.base_version):
            self._work.fetch(task)
        self._fetched()

    def _train(self, order: ef.Train) -> None:
        with span("train", order.task.task_id, version=order.task.base_version):
            done = self._work.train(order)
        if not done:
            return  # the loop tells the session
        self._trained(order.update_id)
        if self._sync is not None and self.session.phase is Phase.PUSHING:
            self._tell("waiting", results=len(self._disk.waiting()), why="results wait for the server")

    def _stop_work(self, task_id: str) -> None:
        """It has ended by itself: see `LeaseKeeper.check`."""
        self._tell("cancelled", task=task_id)

    def _end(self, why: str) -> None:
        self.summary.why, self._ended = why, True

    def _set_timer(self, timer: ef.SetTimer) -> None:
        if timer.name == "heartbeat":
            self._lease.pulse.set(timer.at)
        else:
            self._timers.set(timer)

    def _tell(self, kind: str, **data: Any) -> None:
        log.debug("%s %s %s", self.client_id, kind, data)
        if self._on_event is not None:
            self._on_event(kind, **data)
