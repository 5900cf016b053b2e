"""The device agent: it does what the session says, and tells the session what came of it.

The session (`core/session.py`) decides; here are its hands. Training, network calls and waiting happen
in the thread that calls `run`, heartbeats in another while that one is busy. A result is in the outbox
before it is sent, so the agent may die at any moment and go on from there when it starts again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anabranch.client.held import keep_model, kept_model
from anabranch.client.lease import Cancelled, LeaseKeeper, OnEvent
from anabranch.client.memory import Memories
from anabranch.client.messages import Enrolment
from anabranch.client.outbox import Outbox
from anabranch.client.state import fresh_seed, locked
from anabranch.client.stopping import Bell, Interrupted, interruptible, persist
from anabranch.client.trainer import BaseModel, LocalTrainer
from anabranch.client.transport import Transport
from anabranch.compress.feedback import make_uplink
from anabranch.compress.model import full_bytes
from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.config import ClientTable
from anabranch.core.errors import (
    AnabranchError,
    IdentityError,
    InvalidUpdate,
    ManifestMismatch,
    TooLarge,
    outcome_of,
)
from anabranch.core.ledger import TRAIN_S
from anabranch.core.session import Phase, Session, SessionSettings
from anabranch.core.submodels import Submodel
from anabranch.core.updates import Ask, Reason, Task, Verdict
from anabranch.workloads.app import App, Shard

log = logging.getLogger(__name__)

Effects = list[ef.SessionEffect]


@dataclass
class AgentSummary:
    """What an agent has done when it ends, and `why` it ended."""

    client_id: str
    why: str = ""
    answered: int = 0
    applied: int = 0
    rejected: int = 0
    failures: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    uplink_bytes_raw: int = 0
    downlink_bytes_full_equivalent: int = 0
    training_s: float = 0.0


class Agent:
    """One device of a federation.

    `shard` says which part of the App's data is trained on, or how to find it out from the run that the
    server serves. `tasks_max`: stop after so many answered updates (0: never). `step_time_s`
    emulates a device that needs so long for a local step: after a training the agent rests until it
    has taken that long (0: no rest). A device that is slower by itself is not made faster.
    `seed` is for tests: ids come of it. `bell` has the clock and the sleep.
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
        threads: int = 0,
        seed: int | None = None,
        on_event: OnEvent | None = None,
        bell: Bell | None = None,
    ) -> None:
        settings = settings or ClientTable()
        self.client_id = client_id
        self.summary = AgentSummary(client_id)
        self._transport, self._shard, self._state_dir = transport, shard, state_dir
        self._step_time_s = step_time_s
        self._settings = settings
        self._seed = fresh_seed() if seed is None else seed
        self._on_event = on_event
        self._bell = bell or Bell(time.monotonic)
        self._local = LocalTrainer(app, settings, threads)
        limits = SessionSettings(settings.retry_base_s, settings.retry_cap_s, tasks_max)
        self._session = Session(client_id, self._seed, limits)
        self._lock = threading.Lock()  # of the session
        self._timers: dict[str, float] = {}
        self._lease = LeaseKeeper(transport, self._handle, self._bell, self._tell)
        self._outbox: Outbox | None = None
        self._memories: Memories | None = None
        self._run_id = ""
        self._base: BaseModel | None = None
        self._start_model: BaseModel | None = None  # what the task at hand is trained from
        self._fatal: AnabranchError | None = None

    def stop(self) -> None:
        """From any thread: end soon. A result in the outbox stays there for the next start."""
        self._bell.stop()

    def run(self) -> AgentSummary:
        """Work until the run ends, `tasks_max` is reached, `stop`, SIGTERM or SIGINT.

        Raises what makes going on senseless: `ManifestMismatch`, `AppError`, `StoreLocked`, an
        `IdentityError` and the like.
        """
        with interruptible(self._bell):
            try:
                with locked(self._state_dir):
                    self._run()
            except Interrupted as reason:
                self.summary.why = str(reason)
            finally:
                self._lease.stop()
                self._give_back()
        self._tell("stopped", why=self.summary.why)
        if self._fatal is not None:
            raise self._fatal
        return self.summary

    def _run(self) -> None:
        self._outbox = Outbox(self._state_dir / "outbox")
        self._memories = Memories(self._state_dir / "memory", self._outbox.pending())
        self._enrol()
        self._lease.start()
        todo = deque(self._start())
        while todo or self._session.phase is not Phase.STOPPED:
            self._bell.check()
            if after := self._cancel():
                todo = deque(after)
            todo.extend(self._do(todo.popleft()) if todo else self._await_timer())

    # --- the session -------------------------------------------------------------------------

    def _handle(self, event: ev.SessionEvent) -> Effects:
        with self._lock:
            return self._session.handle(event)

    def _start(self) -> Effects:
        assert self._outbox is not None
        pending = self._outbox.pending()
        return self._handle(ev.Started(self._bell.now(), pending[0] if pending else None))

    def _do(self, effect: ef.SessionEffect) -> Effects:
        """Carry out one order; returns what the session wants next."""
        assert self._outbox is not None
        match effect:
            case ef.AskTask(task_id):
                # What an earlier life has left goes first, be it more than one.
                return self._start() if self._outbox.pending() else self._attempt("ask", self._ask, task_id)
            case ef.FetchModel(task):
                return self._attempt("fetch", self._fetch, task)
            case ef.Train():
                return self._attempt("train", self._train, effect)
            case ef.Push(update_id):
                return self._attempt("push", self._push, update_id)
            case ef.Discard(update_id):
                assert self._memories is not None
                self._memories.drop(update_id)  # unless it was committed
                self._outbox.remove(update_id)
            case ef.SetTimer():
                self._set_timer(effect)
            case ef.Stop(why):
                self.summary.why = why
        return []

    def _attempt(self, call: str, do: Callable[[Any], Effects], argument: Any) -> Effects:
        try:
            return do(argument)
        except IdentityError:
            raise  # nothing will be taken from this device as it is: the outbox waits until it is
        except AnabranchError as error:
            retryable = outcome_of(error).retryable
            self.summary.failures += 1
            self._tell("failed", call=call, error=type(error).__name__, detail=str(error), again=retryable)
            if call == "ask" and isinstance(error, ManifestMismatch):
                self._enrol()  # another run may be served there now: raises if its model is another, too
                retryable = True
            elif call == "ask" and not retryable:
                self._fatal = error
            window_s = getattr(error, "retry_after_s", None)
            return self._handle(ev.CallFailed(self._bell.now(), str(error), retryable, window_s))

    def _cancel(self) -> Effects:
        """What the session makes of a notice that its task is not wanted."""
        task_id = self._lease.take_unwanted()
        effects = self._handle(ev.TaskCancelled(self._bell.now(), task_id)) if task_id else []
        if effects:
            self._tell("cancelled", task=task_id)
        return effects

    # --- the calls ---------------------------------------------------------------------------

    def _enrol(self) -> None:
        seen = persist(
            lambda: self._transport.enrol(self._local.capability()),
            self._bell,
            self._seed,
            self._settings.retry_base_s,
            self._settings.retry_cap_s,
            lambda error: self._tell("failed", call="enrol", error=type(error).__name__, detail=str(error)),
        )
        self._local.adopt(seen.spec)
        if seen.run_id != self._run_id:
            self._base = kept_model(self._state_dir, seen.run_id, self._local.spec)
        self._run_id = seen.run_id
        if self._local.examples is None:
            self._load(seen)
        else:
            self._tell("enrolled", run=seen.run, version=seen.version, examples=len(self._local.examples))

    def _load(self, seen: Enrolment) -> None:
        """Find the data, and say how much it is."""
        self._local.load(self._shard if isinstance(self._shard, Shard) else self._shard(seen.config))
        self._enrol()

    def _ask(self, task_id: str) -> Effects:
        held = None if self._base is None else self._base.version
        answer = self._transport.ask(Ask(self.client_id, task_id, held), self._local.spec)
        now = self._bell.now()
        if isinstance(answer, Task):
            self._lease.progress.begin()
            self._tell("granted", task=answer.task_id, base_version=answer.base_version)
            return self._handle(ev.TaskGranted(now, answer))
        self._tell("refused", reason=answer.reason.value, detail=answer.detail)
        if answer.reason is Reason.UNKNOWN_CLIENT:
            self._enrol()
        return self._handle(ev.TaskRefused(now, answer.retry_after_s, answer.detail, answer.final))

    def _fetch(self, task: Task) -> Effects:
        make_uplink(task.uplink)  # a codec that is not here: better known before the training
        if self._base is not None and self._base.version == task.base_version:
            self._start_model = self._base
        else:
            self._start_model = self._fetched(task.base_version, task.submodel)
            self.summary.downlink_bytes_full_equivalent += full_bytes(self._local.spec)
        if self._start_model.submodel is None and self._start_model is not self._base:
            self._base = self._start_model
            keep_model(self._state_dir, self._base, self._run_id, self._local.spec)
        return self._handle(ev.ModelFetched(self._bell.now()))

    def _fetched(self, version: int, submodel: Submodel | None) -> BaseModel:
        """A version, by what leads there from the one that the device has, or else whole or a part."""
        began, held = self._bell.now(), self._base
        holds = None if held is None else held.version
        layout_hash = self._local.spec.layout_hash
        fetched = self._transport.fetch(layout_hash, version, holds=holds, submodel=submodel)
        size = len(fetched.data)
        self.summary.downlink_bytes += size
        try:
            model = self._local.decode(fetched, held, submodel)
        except (InvalidUpdate, TooLarge) as error:
            if held is None:
                raise
            # What the device has is not what it was: it goes on from nothing.
            self._tell("failed", call="decode", error=type(error).__name__, detail=str(error), again=True)
            self._base = None
            return self._fetched(version, submodel)
        took_s = self._bell.now() - began
        self._tell(
            "fetched", version=version, size_bytes=size, took_s=took_s, from_version=fetched.from_version
        )
        return model

    def _train(self, order: ef.Train) -> Effects:
        assert self._start_model is not None
        assert self._outbox is not None
        assert self._memories is not None
        task_id, lease, began = order.task.task_id, self._lease, self._bell.now()
        layout_hash = self._local.spec.layout_hash
        memory = self._memories.load(self._run_id, layout_hash)

        def each_step() -> None:
            lease.progress.step()
            self._bell.check()
            lease.check(task_id)

        lease.progress.begin()
        try:
            entry, pending = self._local.train(
                order.task, order.update_id, self._start_model, memory, each_step
            )
            lease.progress.begin()
            self._emulate(began + entry.local_steps * self._step_s(order.task), task_id)
            lease.check(task_id)
        except Cancelled:
            return []  # the loop tells the session
        except InvalidUpdate:
            self._memories.forget()
            raise
        took_s = self._bell.now() - began
        self.summary.training_s += took_s
        entry = replace(entry, metrics={**entry.metrics, TRAIN_S: took_s})
        if pending is not None:
            self._memories.put(order.update_id, pending, self._run_id, layout_hash)
        self._outbox.put(entry)
        metrics = dict(entry.metrics)
        self._tell("trained", task=task_id, steps=entry.local_steps, took_s=took_s, metrics=metrics)
        return self._handle(ev.Trained(self._bell.now(), order.update_id))

    def _step_s(self, task: Task) -> float:
        """How long the emulated device needs for a step of the task, seconds; 0 emulates nothing."""
        return self._step_time_s and self._step_time_s * self._local.step_cost(task)

    def _emulate(self, until: float, task_id: str) -> None:
        """Rest while the emulated device would still compute."""
        while (left_s := until - self._bell.now()) > 0:
            self._lease.check(task_id)
            self._bell.rest(left_s)

    def _push(self, update_id: str) -> Effects:
        assert self._outbox is not None
        entry = self._outbox.load(update_id)
        answer = self._transport.push(entry)
        decision = answer.decision
        rejected = decision.verdict is Verdict.REJECTED
        self.summary.answered += 1
        self.summary.rejected += rejected
        self.summary.applied += not rejected
        self.summary.uplink_bytes += len(entry.payload)
        self.summary.uplink_bytes_raw += entry.values * self._local.spec.vector_dtype.itemsize
        if not rejected and self._memories is not None:
            self._memories.commit(update_id)
        self._tell(
            "pushed",
            update=update_id,
            verdict=decision.verdict.value,
            staleness=decision.staleness,
            weight=decision.weight,
            reason=decision.reason.value,
            version=answer.version,
            duplicate=answer.duplicate,
            size_bytes=len(entry.payload),
        )
        return self._handle(ev.PushAcknowledged(self._bell.now(), update_id, decision))

    def _give_back(self) -> None:
        """At the end: a task without a result is of more use to another device."""
        task, outbox = self._session.task, self._outbox
        if task is None or outbox is None or self._session.update_id in outbox.pending():
            return
        try:
            self._transport.drop(task.task_id, self.summary.why or "the device stopped")
        except AnabranchError as error:
            log.info("task %s was not given back, its lease will end: %s", task.task_id, error)

    # --- time --------------------------------------------------------------------------------

    def _set_timer(self, timer: ef.SetTimer) -> None:
        if timer.name == "heartbeat":
            self._lease.set(timer.at)
        else:
            self._timers[timer.name] = timer.at

    def _await_timer(self) -> Effects:
        """Rest until the next timer is due. Woken before, it comes back for a look around."""
        assert self._timers, f"nothing to wait for in phase {self._session.phase}"
        name, at = min(self._timers.items(), key=lambda item: item[1])
        left_s = at - self._bell.now()
        if left_s > 0:
            self._tell("waiting", seconds=left_s)
            self._bell.rest(left_s)
            return []
        del self._timers[name]
        return self._handle(ev.TimerFired(self._bell.now(), name))

    def _tell(self, kind: str, **data: Any) -> None:
        log.debug("%s %s %s", self.client_id, kind, data)
        if self._on_event is not None:
            self._on_event(kind, **data)
