"""The device agent: it does what the session says, and tells the session what came of it.

The session (`core/device/session.py`) decides; here are its hands, in the thread that calls `run`, but
for heartbeats, and for what goes on in the background: pushes (`client.push = "overlap"`) or training
(`elastic`). A result is in the outbox before it is sent: the agent may die at any moment, and go on from it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.client.applications import Applications
from anabranch.client.elastic import ElasticTrainer
from anabranch.client.held import HeldModels
from anabranch.client.kept import Kept
from anabranch.client.lease import LeaseKeeper, OnEvent
from anabranch.client.memory import Memories
from anabranch.client.messages import Enrolment
from anabranch.client.neighbours import Neighbours
from anabranch.client.outbox import Outbox, OutboxBounds
from anabranch.client.shadow import Order, SyncThread
from anabranch.client.state import KEPT, MEMORY, OUTBOX, fresh_seed, locked
from anabranch.client.stopping import Bell, Interrupted, interruptible, persist
from anabranch.client.summary import AgentSummary
from anabranch.client.timers import Reach, Timers
from anabranch.client.trainer import LocalTrainer
from anabranch.client.transport import Transport
from anabranch.client.work import Work
from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.config.ranges import ELASTIC, OVERLAP
from anabranch.core.config.tables import ClientTable, build
from anabranch.core.device.overlap import PUSH_TIMER, OverlapSession
from anabranch.core.device.session import Phase, Session, SessionSettings
from anabranch.core.errors import (
    AnabranchError,
    AppError,
    IdentityError,
    ManifestMismatch,
    Unavailable,
    WireError,
    outcome_of,
)
from anabranch.core.model.updates import Reason, Task, Verdict
from anabranch.workloads.app import App, Shard

log = logging.getLogger(__name__)

Effects = list[ef.SessionEffect]


class Agent:
    """One device of a federation.

    `shard` says which part of the App's data is trained on, or how to find it out from the run that the
    server serves. `tasks_max`: stop after so many answered updates (0: never). `step_time_s`
    emulates a device that needs so long for a local step: after a training the agent rests until it
    has taken that long (0: no rest). A device that is slower by itself is not made faster.
    `seed` is for tests: ids come of it. `bell` has the clock and the sleep. `outbox`: what it holds at most.
    `threads`, `neighbours`: see `LocalTrainer`.
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
        neighbours: Neighbours | None = None,
        seed: int | None = None,
        on_event: OnEvent | None = None,
        bell: Bell | None = None,
        outbox: OutboxBounds | None = None,
    ) -> None:
        settings = settings or ClientTable()
        self.client_id = client_id
        self.summary = AgentSummary(client_id)
        self._transport, self._shard, self._state_dir = transport, shard, state_dir
        self._settings, self._step_time_s = settings, step_time_s
        self._seed = fresh_seed() if seed is None else seed
        self._on_event = on_event
        self._bell = bell or Bell(time.monotonic)
        self._local = LocalTrainer(app, settings, threads, client_id, neighbours)
        self._limits = SessionSettings(settings.retry_base_s, settings.retry_cap_s, tasks_max)
        self._session = Session(client_id, self._seed, self._limits)
        self._lock = threading.Lock()  # of the session
        self._todo: deque[ef.SessionEffect] = deque()  # for the thread of `run`
        self._reach, self._sync_reach = Reach(), Reach()  # of this thread's calls, of the sync thread's
        self._timers = Timers(self._bell, lambda left_s: self._tell("waiting", seconds=left_s), self._reach)
        self._sync: SyncThread | None = None
        self._elastic: ElasticTrainer | None = None
        self._lease = LeaseKeeper(transport, self._handle, self._bell, self._tell, self._advise)
        self._bounds = outbox
        self._outbox: Outbox | None = None
        self._memories: Memories | None = None
        self._work: Work | None = None
        self._models = HeldModels(self._local, transport, state_dir, self._bell.now, self.summary, self._tell)
        self._fatal: AnabranchError | None = None
        self._applications = Applications(client_id, state_dir, self._seed)

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

        Raises what makes going on senseless: `ManifestMismatch`, `AppError`, `IdentityError` and the like.
        """
        with interruptible(self._bell):
            try:
                with locked(self._state_dir):
                    self._run()
            except Interrupted as reason:
                self.summary.why = str(reason)
            finally:
                self._lease.stop()
                if self._sync is not None:
                    self._sync.stop()
                if self._elastic is not None:
                    self._elastic.stop()
                self._drop_task()
        self._tell("stopped", why=self.summary.why)
        if self._fatal is not None:
            raise self._fatal
        return self.summary

    def _run(self) -> None:
        self._outbox = Outbox(self._state_dir / OUTBOX, self._bounds)
        pending = self._outbox.pending()
        self._memories = Memories(self._state_dir / MEMORY, pending)
        self._work = Work(
            self._local,
            self._models,
            self._outbox,
            self._memories,
            Kept(self._state_dir / KEPT, pending),
            self._lease,
            self._bell,
            self.summary,
            self._tell,
            self._check,
            self._step_time_s,
        )
        self._follow(self._enrol(), self._work)
        self._lease.start()
        first, later = (pending[0], tuple(pending[1:])) if pending else (None, ())
        self._order(self._handle(ev.Started(self._bell.now(), first, later)))
        while self._todo or self._session.phase is not Phase.STOPPED:
            self._check()
            self._cancel()
            self._order(self._do(self._todo.popleft()) if self._todo else self._await_timer())

    def _check(self) -> None:
        """Raises what ends the agent: a stop, or an error in the sync thread."""
        self._bell.check()
        if self._sync is not None:
            self._sync.check()

    # --- the session -------------------------------------------------------------------------

    def _handle(self, event: ev.SessionEvent) -> Effects:
        with self._lock:
            return self._session.handle(event)

    def _follow(self, seen: Enrolment, work: Work) -> None:
        """Push as the run says."""
        table = seen.config.get("client", {})
        if table.get("push") == ELASTIC:
            self._elastic = ElasticTrainer(
                self._local, build(ClientTable, table, "client"), self._bell, self._step_time_s
            )
            work.trainer, work.step_time_s = self._elastic, 0.0  # the training itself takes that long
            limits = replace(self._limits, ask_with_push=True)
            self._session = Session(self.client_id, self._seed, limits)
        if table.get("push") == OVERLAP:
            held_max = int(seen.config.get("server", {}).get("tasks_per_client", 1))
            limits = replace(self._limits, tasks_held_max=held_max)
            self._session = OverlapSession(self.client_id, self._seed, limits)
            work.waits_for_room = True
            self._sync = SyncThread(self._carry, self._bell.now, self._bell.ring, self._sync_reach)
            self._sync.start()

    def _advise(self) -> None:
        """The server wants what there is: of use to a device that trains on."""
        if self._elastic is not None:
            self._elastic.advise()

    def _order(self, effects: Effects) -> None:
        """To each thread its orders."""
        for effect in effects:
            match effect:
                case ef.Push() if self._sync is not None:
                    self._sync.take(effect)
                case ef.SetTimer(name) if self._sync is not None and name == PUSH_TIMER:
                    self._sync.take(effect)
                case ef.Discard(update_id):
                    self._discard(update_id)
                case _:
                    self._todo.append(effect)

    def _carry(self, order: Order) -> None:
        """In the sync thread."""
        match order:
            case ef.Push():
                self._order(self._attempt("push", self._push, order))
            case ef.SetTimer(name):
                self._order(self._handle(ev.TimerFired(self._bell.now(), name)))
        self._bell.ring()

    def _discard(self, update_id: str) -> None:
        assert self._outbox is not None
        assert self._memories is not None
        self._memories.drop(update_id)  # unless it was committed
        self._outbox.remove(update_id)

    def _do(self, effect: ef.SessionEffect) -> Effects:
        """Carry out one order; returns what the session wants next."""
        match effect:
            case ef.FetchModel(task) | ef.Train(task) if task is not self._session.task:
                return []  # it was cancelled before its turn came
            case ef.AskTask(task_id):
                return self._attempt("ask", self._ask, task_id)
            case ef.FetchModel(task):
                return self._attempt("fetch", self._fetch, task)
            case ef.Train():
                return self._attempt("train", self._train, effect)
            case ef.Push():
                return self._attempt("push", self._push, effect)
            case ef.GiveBack(task_id, why, diverged):
                self._give_back(task_id, why, diverged)
            case ef.SetTimer():
                self._set_timer(effect)
            case ef.Stop(why):
                self.summary.why = why
        return []

    def _attempt(self, call: str, do: Callable[[Any], Effects], argument: Any) -> Effects:
        reach = self._sync_reach if call == "push" and self._sync is not None else self._reach
        reach.begin()
        try:
            return do(argument)
        except IdentityError:
            raise  # nothing will be taken from this device as it is: the outbox waits until it is
        except AppError:
            raise  # the next task would end like this one
        except AnabranchError as error:
            if isinstance(error, Unavailable):
                reach.nobody()
            retryable = outcome_of(error).retryable
            with self._lock:
                self.summary.failures += 1
            self._tell("failed", call=call, error=type(error).__name__, detail=str(error), again=retryable)
            if call == "ask" and isinstance(error, ManifestMismatch):
                self._enrol()  # another run may be served there now: raises if its model is another, too
                retryable = True
            elif call == "ask" and not retryable:
                self._fatal = error
            elif call == "push" and not retryable:
                log.warning("%s: it is given up", error)
            update_id = argument.update_id if isinstance(argument, ef.Push) else None
            now, again_s = self._bell.now(), error.retry_after_s
            flawed = call in ("train", "push") and isinstance(error, WireError)
            return self._handle(ev.CallFailed(now, str(error), retryable, again_s, update_id, flawed))

    def _cancel(self) -> None:
        """Tell the session of notices that a task is not wanted."""
        for task_id in self._lease.take_unwanted():
            if effects := self._handle(ev.TaskCancelled(self._bell.now(), task_id)):
                self._tell("cancelled", task=task_id)
                self._order(effects)

    # --- the calls ---------------------------------------------------------------------------

    def _enrol(self) -> Enrolment:
        seen = persist(
            lambda: self._transport.enrol(self._local.capability()),
            self._bell,
            self._seed,
            self._settings.retry_base_s,
            self._settings.retry_cap_s,
            lambda error: self._tell("failed", call="enrol", error=type(error).__name__, detail=str(error)),
        )
        self._local.join(seen.spec, seen.config)
        self._models.join(seen.run_id)
        assert self._work is not None
        self._work.run_id = seen.run_id
        if self._local.examples is None:  # find the data, and say how much it is
            self._local.load(self._shard if isinstance(self._shard, Shard) else self._shard(seen.config))
            return self._enrol()
        self._tell("enrolled", run=seen.run, version=seen.version, examples=len(self._local.examples))
        return seen

    def _ask(self, task_id: str) -> Effects:
        answer = self._transport.ask(self._applications.ask(task_id, self._models.version), self._local.spec)
        now = self._bell.now()
        if isinstance(answer, Task):
            self._lease.progress.begin()
            self._tell("granted", task=answer.task_id, base_version=answer.base_version)
            return self._handle(ev.TaskGranted(now, answer))
        self._tell("refused", reason=answer.reason.value, detail=answer.detail)
        if answer.reason is Reason.UNKNOWN_CLIENT:
            self._enrol()
        self.summary.run_ended = answer.final
        return self._handle(ev.TaskRefused(now, answer.retry_after_s, answer.detail, answer.final))

    def _fetch(self, task: Task) -> Effects:
        assert self._work is not None
        self._work.fetch(task)
        return self._handle(ev.ModelFetched(self._bell.now()))

    def _train(self, order: ef.Train) -> Effects:
        assert self._work is not None
        if not self._work.train(order):
            return []  # the loop tells the session
        effects = self._handle(ev.Trained(self._bell.now(), order.update_id))
        if self._sync is not None and self._session.phase is Phase.PUSHING and self._outbox is not None:
            self._tell("waiting", results=len(self._outbox.pending()), why="results wait for the server")
        return effects

    def _push(self, order: ef.Push) -> Effects:
        assert self._outbox is not None
        update_id = order.update_id
        entry = self._outbox.load(update_id)
        if order.next_task_id:
            ask = self._applications.ask(order.next_task_id, self._models.version)
            answer = self._transport.push_and_ask(entry, ask, self._local.spec)
        else:
            answer = self._transport.push(entry)
        decision = answer.decision
        self.summary.pushed(entry, answer, self._local.spec.vector_dtype.itemsize)
        if decision.verdict is not Verdict.REJECTED and self._memories is not None:
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
        task = answer.next if isinstance(answer.next, Task) else None
        if task is not None:
            self._tell("granted", task=task.task_id, base_version=task.base_version)
        return self._handle(ev.PushAcknowledged(self._bell.now(), update_id, decision, task))

    def _drop_task(self) -> None:
        """At the end: a task without a result is of more use to another device."""
        task, outbox = self._session.task, self._outbox
        if task is not None and outbox is not None and self._session.update_id not in outbox.pending():
            self._give_back(task.task_id, self.summary.why or "the device stopped")

    def _give_back(self, task_id: str, why: str, diverged: bool = False) -> None:
        try:
            self._transport.drop(task_id, why, diverged)
        except AnabranchError as error:
            log.info("task %s was not given back, its lease will end: %s", task_id, error)

    # --- time --------------------------------------------------------------------------------

    def _set_timer(self, timer: ef.SetTimer) -> None:
        if timer.name == "heartbeat":
            self._lease.set(timer.at)
        else:
            self._timers.set(timer)

    def _await_timer(self) -> Effects:
        """Rest until the next timer is due. Woken before, it comes back for a look around."""
        name = self._timers.due()
        return [] if name is None else self._handle(ev.TimerFired(self._bell.now(), name))

    def _tell(self, kind: str, **data: Any) -> None:
        log.debug("%s %s %s", self.client_id, kind, data)
        if self._on_event is not None:
            self._on_event(kind, **data)
