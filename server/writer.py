"""The single writer: one queue, one thread, and in it the store and the engine.

For every batch of the queue, in the thread: what needs no journal is answered, the rest is appended
to the store in one commit, and only then given to the engine. A caller hears of its event after it is
durable. While one commit is under way the next batch gathers, so the commits are as large as the load.

A full disk (`StoreFull`) costs a batch its answers and nothing else. After any other failure nobody
can tell what is durable, so the writer stops: a restart reads the truth from the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from anabranch.core import events as ev
from anabranch.core.effects import Decided, Effect, Granted, Published
from anabranch.core.engine import Engine
from anabranch.core.errors import AnabranchError, Overloaded, StoreFull, Unavailable
from anabranch.core.journal import to_record
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.params import digest
from anabranch.core.snapshot import take_snapshot
from anabranch.core.updates import TaskState
from anabranch.server.clock import WallClock
from anabranch.server.models import DIGEST_BYTES_MAX, Models
from anabranch.server.store.base import DiskFailed, Entry, Projection, Store

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_FULL_DISK_S = 1.0
# A snapshot holds everybody up: the next one waits until it would take at most a part in so many of the time.
SAVING_SHARE = 20


@dataclass(frozen=True)
class Saved:
    """How far the newest snapshot goes: events, versions and applied updates."""

    seq: int = 0
    version: int = 0
    applied: int = 0


class Listener(Protocol):
    """Hears of effects once they are durable, on the event loop."""

    def __call__(self, seq: int, now: float, effects: Sequence[Effect]) -> None:
        """`seq` is the last event in the log at that time."""
        ...


@dataclass(frozen=True)
class Answer:
    """What came of an event. `seq`: its place in the log, None where nothing was logged."""

    seq: int | None
    effects: Sequence[Effect]


@dataclass
class _Call:
    """One turn of the queue: an event to log, or a look at the engine."""

    event: ev.Event | None
    inline: bytes | None = None
    look: Callable[[Engine], Any] | None = None
    future: asyncio.Future[Any] | None = None
    seq: int | None = None
    effects: list[Effect] = field(default_factory=list)
    value: Any = None
    error: BaseException | None = None

    def settle(self) -> None:
        """Tell the caller, unless it went away."""
        if self.future is None or self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value if self.event is None else Answer(self.seq, self.effects))


class _Books:
    """What happens in the writer's thread. Only that thread may call its methods."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        models: Models,
        every: tuple[int, int],
        seq: int,
        saved: Saved,
    ) -> None:
        self.engine, self.store, self.models = engine, store, models
        self.seq = seq
        self.duplicates = 0
        self._projections: list[Projection] = []
        self._every_versions, self._every_updates = every
        self._saved = saved
        self._not_before = 0.0

    def commit(self, batch: Sequence[_Call]) -> float | None:
        """Answer a batch; returns when a tick is due. Raises what no restart may ignore."""
        logged = [call for call in batch if call.event is not None and not self._answered(call)]
        if logged:
            self._log(logged)
        for call in batch:
            if call.look is not None:
                self._look(call)
        return self.engine.next_deadline()

    def project(self) -> None:
        """Write what the log implies, all of it."""
        self._append([])

    def flush(self, now: float) -> None:
        """Write what the log implies, and a snapshot if there is anything new."""
        try:
            self.project()
            if self.seq > self._saved.seq:
                self.save(now)
        except StoreFull as full:  # the log has it all: the next start takes longer, no more
            log.warning("no snapshot was written: %s", full)

    def save(self, now: float) -> None:
        """Write a snapshot of the engine as it is. Raises `StoreFull`."""
        began, engine, digests = time.perf_counter(), self.engine, {}
        if engine.version > self._saved.version:
            digests = {engine.version: digest(engine.vector)}
        # The projections of all that the snapshot covers come first: nobody would write them after it.
        self._projections.append(Projection(self.seq, now, (), digests))
        self.project()
        self.store.save_snapshot(take_snapshot(engine, copy=False), self.seq, now)
        self._saved = Saved(self.seq, engine.version, engine.counters.applied)
        ended = time.perf_counter()
        self._not_before = ended + SAVING_SHARE * (ended - began)

    def _look(self, call: _Call) -> None:
        assert call.look is not None
        try:
            call.value = call.look(self.engine)
        except DiskFailed:
            raise
        except AnabranchError as error:
            call.error = error

    def _answered(self, call: _Call) -> bool:
        """Answer an event that changes nothing, without the journal."""
        ledger = self.engine.ledger
        match call.event:
            case ev.Enrolled(client_id=client_id, capability=capability):
                client = ledger.clients.get(client_id)
                return client is not None and client.capability == capability
            case ev.TaskDropped(client_id=client_id, task_id=task_id):
                task = ledger.tasks.get(task_id)
                return task is None or task.client_id != client_id
            case ev.LeaseRenewed(client_id=client_id, task_id=task_id, progress=progress):
                task = ledger.tasks.get(task_id)
                held = task is not None and (task.client_id, task.state) == (client_id, TaskState.LEASED)
                return not held or task is None or progress <= task.progress
            case ev.TaskAsked(now, ask):
                refused = self.engine.refusal(ask, now)
                call.effects = [refused] if refused else []
            case ev.UpdateArrived(update=update):
                known = ledger.receipts.get(update.update_id)
                if known:
                    self.duplicates += 1
                    call.effects = [Decided(update.client_id, known, update.examples, duplicate=True)]
        return bool(call.effects)

    def _log(self, calls: list[_Call]) -> None:
        entries = [Entry(to_record(c.event), c.inline) for c in calls if c.event is not None]
        try:
            seqs = self._append(entries)
        except StoreFull as full:
            for call in calls:
                call.error = full
            return
        for call, seq in zip(calls, seqs, strict=True):
            self._apply(call, seq)
        self.models.retain(self.engine.ledger.bases)
        self._save_if_due(calls)

    def _append(self, entries: list[Entry]) -> list[int | None]:
        if not entries and not self._projections:
            return []
        seqs = self.store.append(entries, self._projections)
        self._projections = []
        return seqs

    def _apply(self, call: _Call, seq: int | None) -> None:
        assert call.event is not None
        if seq is None:  # in the log from long ago: the engine has forgotten it, the store has not
            self._recall(call)
            return
        self.seq = call.seq = seq
        call.effects = self.engine.handle(call.event)
        digests = {}
        for effect in call.effects:
            if isinstance(effect, Granted):
                self.models.keep(self.engine, effect.task.base_version)
            elif isinstance(effect, Published):
                self.models.published(effect.version, call.event.now)
                if effect.vector.nbytes <= DIGEST_BYTES_MAX:
                    digests[effect.version] = digest(effect.vector)
        self._projections.append(Projection(seq, call.event.now, call.effects, digests))

    def _recall(self, call: _Call) -> None:
        assert isinstance(call.event, ev.UpdateArrived)
        update = call.event.update
        self.duplicates += 1
        known = self.engine.ledger.receipts.get(update.update_id) or self.store.receipt(update.update_id)
        assert known is not None, f"update {update.update_id} is in the log but has no verdict"
        call.effects = [Decided(update.client_id, known, update.examples, duplicate=True)]

    def _save_if_due(self, calls: list[_Call]) -> None:
        versions = self.engine.version - self._saved.version
        updates = self.engine.counters.applied - self._saved.applied
        due = 0 < self._every_versions <= versions or 0 < self._every_updates <= updates
        if due and calls[-1].event is not None and time.perf_counter() >= self._not_before:
            try:
                self.save(calls[-1].event.now)
            except StoreFull as full:  # the log has it all: a later batch tries again
                log.warning("no snapshot was written: %s", full)


class Writer:
    """See the module. Methods are for the event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        models: Models,
        clock: WallClock,
        seq: int = 0,
        saved: Saved = Saved(),
        every: tuple[int, int] = (0, 0),
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._books = _Books(engine, store, models, every, seq, saved)
        self._clock, self._limits = clock, limits
        self._thread = ThreadPoolExecutor(1, "anabranch-writer")
        self._queue: asyncio.Queue[_Call | None] = asyncio.Queue()
        self._tick: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.listener: Listener | None = None
        # Updates that are whole and will be submitted within milliseconds.
        self.coming = 0
        self._company = 1
        # Set when the writer has stopped by itself; `failure` says why.
        self.stopped = asyncio.Event()
        self.failure: BaseException | None = None

    @property
    def engine(self) -> Engine:
        """For single reads of numbers and names; whatever is wider goes through `look`."""
        return self._books.engine

    @property
    def duplicates(self) -> int:
        """Updates that were answered from a stored verdict since the start."""
        return self._books.duplicates

    @property
    def seq(self) -> int:
        """The last event in the log."""
        return self._books.seq

    def now(self) -> float:
        """The time to stamp the next event with; submit it before anything else is awaited."""
        return self._clock.now()

    def start(self) -> None:
        """Take calls from now on."""
        self._schedule(self._books.engine.next_deadline())
        self._task = asyncio.get_running_loop().create_task(self._run(), name="anabranch-writer")

    async def submit(self, event: ev.Event, inline: bytes | None = None) -> Answer:
        """Log an event and return what came of it, once it is durable.

        Raises `Overloaded` when the queue is full, `StoreFull`, and `Unavailable` after a failure.
        """
        answer: Answer = await self._enqueue(_Call(event, inline))
        return answer

    async def look(self, question: Callable[[Engine], T]) -> T:
        """Ask the engine something, in turn with the events; the question may change nothing."""
        value: T = await self._enqueue(_Call(None, look=question))
        return value

    async def look_store(self, question: Callable[[Store], T]) -> T:
        """Ask the store something, in turn with the events."""
        books = self._books

        def ask(_: Engine) -> T:
            books.project()
            return question(books.store)

        return await self.look(ask)

    async def close(self) -> None:
        """Finish the queue, write a last snapshot, and let the thread go. The store stays open."""
        self._closing = True
        if self._tick is not None:
            self._tick.cancel()
        if self._task is not None:
            self._queue.put_nowait(None)
            await self._task
        if self.failure is None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._books.flush, self.now())
        self._thread.shutdown()

    # --- the queue ---------------------------------------------------------------------------

    async def _enqueue(self, call: _Call) -> Any:
        if self.failure is not None:
            raise Unavailable(f"the writer has stopped: {self.failure}")
        if self._closing:
            raise Unavailable("the server is going down: try again when it is back")
        if self._queue.qsize() >= self._limits.queue_events_max:
            raise Overloaded(f"{self._queue.qsize()} events are waiting, the queue is full")
        call.future = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(call)
        return await call.future

    async def _run(self) -> None:
        while (batch := await self._gather()) is not None:
            await self._take(batch)
            del batch  # the next one may be long in coming, and updates are large

    async def _take(self, batch: list[_Call]) -> None:
        if self.failure is not None:
            self._fail(batch, self.failure)
            return
        loop = asyncio.get_running_loop()
        try:
            deadline = await loop.run_in_executor(self._thread, self._books.commit, batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing may be logged after it
            self._fail(batch, error)
            return
        for call in batch:
            call.settle()
            if self.listener is not None and call.event is not None and call.error is None:
                self.listener(self.seq if call.seq is None else call.seq, call.event.now, call.effects)
        full = any(isinstance(c.error, StoreFull) for c in batch)
        self._schedule(deadline, RETRY_FULL_DISK_S if full else 0.0)

    async def _gather(self) -> list[_Call] | None:
        """The next batch; None when the queue is at its end.

        It waits a little for as many calls as the last batch had: who was answered together asks
        together, and a commit costs much the same for one as for many.
        """
        batch: list[_Call] = []
        call = await self._queue.get()
        latest = asyncio.get_running_loop().time() + self._limits.commit_wait_s
        while call is not None:
            batch.append(call)
            if len(batch) >= self._limits.commit_events_max:
                break
            if not self._queue.empty():
                call = self._queue.get_nowait()
            elif len(batch) >= self._company and not self.coming:
                break
            else:
                try:
                    async with asyncio.timeout_at(latest):
                        call = await self._queue.get()
                except TimeoutError:
                    break
        else:
            if batch:
                self._queue.put_nowait(None)
        self._company = len(batch)
        return batch or None

    def give_up(self, error: BaseException) -> None:
        """Take no more calls: what is on the disk is unknown, a restart must find out."""
        self.failure = self.failure or error
        self.stopped.set()

    def _fail(self, batch: list[_Call], error: BaseException) -> None:
        self.give_up(error)
        while not self._queue.empty():
            if (waiting := self._queue.get_nowait()) is not None:
                batch.append(waiting)
        for call in batch:
            call.error = Unavailable(f"the writer has stopped: {error}")
            call.settle()

    def _schedule(self, deadline: float | None, at_least_s: float = 0.0) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        if deadline is not None and not self._closing:
            delay_s = max(at_least_s, deadline - self.now())
            self._tick = asyncio.get_running_loop().call_later(delay_s, self._enqueue_tick)

    def _enqueue_tick(self) -> None:
        self._tick = None
        self._queue.put_nowait(_Call(ev.Ticked(self.now())))
