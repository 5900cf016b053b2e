"""The single writer: one queue, one thread, and in it the store and the engine (`books.py`).

A caller hears of its event after it is durable. While one commit is under way the next batch gathers, so
the commits are as large as the load.

A full disk (`StoreFull`) costs a batch its answers and nothing else. After any other failure nobody
can tell what is durable, so the writer stops: a restart reads the truth from the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from anabranch.core import events as ev
from anabranch.core.clock import EventClock
from anabranch.core.effects import Effect
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import Overloaded, StoreFull, Unavailable
from anabranch.core.limits import DEFAULT_LIMITS, MIB, RETRY_FULL_DISK_S, Limits
from anabranch.core.retention import ALL, Keep
from anabranch.host.rollback import Refolder
from anabranch.server.books import Answer, Books, Call
from anabranch.server.deadline import Deadline
from anabranch.server.failpoints import reach
from anabranch.server.glance import Glance
from anabranch.server.history import History, head_at
from anabranch.server.lanes import Lanes
from anabranch.server.metrics import Metrics
from anabranch.server.models import Models
from anabranch.server.room import Room
from anabranch.server.saving import Every, SavedPoint
from anabranch.server.store.base import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

ENOUGH_BYTES = MIB  # of updates in a batch
FOLDED_AT_ONCE = 100  # events of the log, when it is folded for a rollback
STOPPED = "the server has stopped; its log says why"  # hosts, users and files are no device's business
FOLLOWED_S = 1.0  # after so long at most the rows of an event are written, for who looks from outside


class Listener(Protocol):
    """Hears of effects once they are durable, on the event loop."""

    def __call__(self, seq: int, now: float, effects: Sequence[Effect]) -> None:
        """`seq` is the last event in the log at that time."""
        ...


class Writer:
    """The queue of everything that changes a run, and the thread that works it off in batches.

    Methods are for the event loop's thread. What an operator wants goes `ahead` of the devices' calls, and
    is let in where these fill the queue.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        models: Models,
        clock: EventClock,
        history: History,
        seq: int = 0,
        saved: SavedPoint | None = None,
        every: Every | None = None,
        limits: Limits = DEFAULT_LIMITS,
        keep: Keep = ALL,
        metrics: Metrics | None = None,
    ) -> None:
        self.metrics = metrics or Metrics()
        self._books = Books(
            engine,
            store,
            models,
            every=every or Every(),
            seq=seq,
            saved=saved or SavedPoint(),
            history=history,
            limits=limits,
            keep=keep,
            metrics=self.metrics,
        )
        self._clock, self._limits = clock, limits
        self._thread = ThreadPoolExecutor(1, "anabranch-writer")
        self._books.saving.executor = self._snapshots = ThreadPoolExecutor(1, "anabranch-snapshots")
        self._books.long_parts.executor = self._long_parts = ThreadPoolExecutor(1, "anabranch-long-parts")
        self._waiting: list[Call] = []  # for a long part
        self._queue = Lanes()
        self._tick: asyncio.TimerHandle | None = None
        self._follow: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        # Whether the log is still to hear that the server is back: until then no lease may end.
        self._returning = self._cannot_return = False
        self.room = Room()
        self.glance = self._books.glances.take()  # how the run stood after the newest batch
        self.listener: Listener | None = None
        # Updates that are whole and will be submitted within milliseconds.
        self.coming = 0
        self._turn_at: float | None = None  # when the turn that is under way began, monotonic
        self._company, self._came = 1, 0  # calls that a batch waits for; events of callers so far
        # Set when the writer has stopped by itself; `failure` says why.
        self.stopped = asyncio.Event()
        self.failure: BaseException | None = None

    @property
    def history(self) -> History:
        """The chain of the versions; for single looks."""
        return self._books.history

    @property
    def keeps_updates(self) -> bool:
        """Whether the engine's strategy does, which never changes."""
        return self._books.engine.keeps_updates

    @property
    def run_twice(self) -> list[str]:
        """Clients that were lately seen to be run by two processes at a time; for `look` alone."""
        return self._books.line.sessions.twins(self.now())

    @property
    def queue_size(self) -> int:
        """Events and looks that wait; from any thread."""
        return self._queue.qsize() + len(self._waiting)

    @property
    def turn_s(self) -> float:
        """For how long one turn of the thread has been under way; 0: none is."""
        return 0.0 if self._turn_at is None else time.monotonic() - self._turn_at

    def fold_by(self, refold: Refolder) -> None:
        """How the states of rollbacks are made; without it there are none."""
        self._books.refold = refold

    @property
    def seq(self) -> int:
        """The last event in the log."""
        return self._books.seq

    def now(self) -> float:
        """The time to stamp the next event with; submit it before anything else is awaited."""
        return self._clock.now()

    def start(self) -> None:
        """Take calls from now on. Who has a task has had nobody to tell so: that comes first."""
        self._returning = bool(self.glance.live_tasks)
        if self._returning:
            self._enqueue_tick()
        else:
            self._schedule(self.glance.deadline)
        loop = asyncio.get_running_loop()

        def written() -> None:
            with suppress(RuntimeError):  # a writer that has failed does not wait for it
                loop.call_soon_threadsafe(self._queue.put_nowait, Call(None))  # an empty batch

        self._books.saving.written = self._books.long_parts.made = written
        self._task = loop.create_task(self._run(), name="anabranch-writer")

    async def submit(self, event: ev.Event, inline: bytes | None = None, ahead: bool = False) -> Answer:
        """Log an event and return what came of it, once it is durable.

        Raises `Overloaded` when the queue is full, `StoreFull`, and `Unavailable` after a failure.
        """
        answer: Answer = await self._put(Call(event, inline, ahead=ahead))
        return answer

    async def submit_both(
        self, event: ev.Event, inline: bytes | None, follow_up: ev.Event
    ) -> tuple[Answer, Answer]:
        """Two events with nothing in between but, seldom, what goes ahead. Raises as `submit` does.

        The second is logged only where the first is, or was decided before. But for a first by the id of
        another update, of the same batch or one that the engine has forgotten: that it is refused is known
        only once both are in the log.
        """
        leading = Call(event, inline)
        first, second = self._put(leading), self._put(Call(follow_up, behind=leading), first=False)
        try:
            return await first, await second
        finally:
            if not (second.cancel() or second.cancelled()):
                second.exception()  # else, where the first has failed, the error of the second is nobody's

    async def roll_back(self, event: ev.RolledBack) -> Answer:
        """Fold the log a little at a time, in turn with what else comes in, and then log the rollback.

        Raises `UnknownVersion`, `ConfigError` and what `submit` does.
        """
        folding = await self.look(lambda _: self._books.begin_rollback(event), ahead=True)
        while await self.look(lambda _: folding.advance(FOLDED_AT_ONCE), ahead=True):
            pass
        call = Call(replace(event, now=self.now()), folding=folding, ahead=True)
        answer: Answer = await self._put(call)
        return answer

    async def look(self, question: Callable[[Engine], T], ahead: bool = False) -> T:
        """Ask the engine something, in turn with the events; the question may change nothing."""
        value: T = await self._put(Call(None, look=question, ahead=ahead))
        return value

    async def head_of(self, version: int) -> str | None:
        """A version's head, hex: its name, of which its number is a part. None where there is none."""
        if (head := self.history.head_of(version)) is not None:
            return head
        return await self.look_store(lambda store: head_at(store, version))

    async def look_store(self, question: Callable[[Store], T], ahead: bool = False) -> T:
        """Ask the store something, in turn with the events."""
        books = self._books

        def ask(_: Engine) -> T:
            books.project()
            return question(books.store)

        return await self.look(ask, ahead)

    async def close(self) -> None:
        """Finish the queue, write a last snapshot, and let the thread go. The store stays open."""
        self._closing = True
        for timer in (self._tick, self._follow):
            if timer is not None:
                timer.cancel()
        if self._task is not None:
            self._queue.put_nowait(None)
            await self._task
        if self.failure is None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._books.flush, self.now())
        self._thread.shutdown()
        self._snapshots.shutdown()
        self._long_parts.shutdown(wait=False, cancel_futures=True)  # after a failure one may be under way

    # --- the queue ---------------------------------------------------------------------------

    def _put(self, call: Call, first: bool = True) -> asyncio.Future[Any]:
        """Into the queue. What follows up is let in where it is full."""
        if self.failure is not None:
            raise Unavailable(STOPPED)
        if self._closing:
            raise Unavailable("the server is going down: try again when it is back")
        waiting = self._queue.ahead if call.ahead else self.queue_size
        if first and waiting >= self._limits.queue_events_max:
            raise Overloaded(f"{waiting} events are waiting, the queue is full")
        call.future = asyncio.get_running_loop().create_future()
        self._came += call.event is not None
        self._queue.put_nowait(call)
        return call.future

    async def _run(self) -> None:
        with closing(Deadline()) as deadline:
            while (batch := await self._gather(deadline)) is not None:
                await self._take(batch)
                del batch  # the next one may be long in coming, and updates are large
        while self._waiting:
            await self._take([], wait=True)

    async def _take(self, batch: list[Call], wait: bool = False) -> None:
        everybody = [*self._waiting, *batch]
        if self.failure is not None:
            self._fail(everybody, self.failure)
            return
        loop, now, came = asyncio.get_running_loop(), time.perf_counter(), self._came
        for call in batch:
            if call.event is not None:
                self.metrics.queue_wait_s.add(now - call.queued_at)
        self._turn_at = time.monotonic()
        try:
            self.glance = await loop.run_in_executor(self._thread, self._commit, everybody, wait)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing may be logged after it
            self._fail(everybody, error)
            return
        finally:
            self._turn_at = None
        self._waiting = self._books.waiting
        self._company += self._came - came
        answered, self._books.answered = self._books.answered, []  # updates are large
        del everybody
        self._settle(answered)
        reach("answered")
        self._hear_of_room(answered)
        for call in answered:
            if isinstance(call.event, ev.Returned):
                self._has_returned(call.error)
        self._follow_up(answered)
        self._await_deadline(full=any(isinstance(call.error, StoreFull) for call in answered))

    def _settle(self, answered: Sequence[Call]) -> None:
        """Tell the callers, and the listener what happened."""
        for call in answered:
            call.settle()
            if self.listener is not None and call.event is not None and call.error is None:
                self.listener(self.seq if call.seq is None else call.seq, call.event.now, call.effects)

    def _follow_up(self, answered: Sequence[Call]) -> None:
        """Have rows written, soon, that may lack something of the log.

        After resends as well, and where there was no room for rows: what came of earlier events may wait.
        """
        behind = any((call.event is None) != (call.error is None) for call in answered)
        if self._follow is None and not self._closing and behind:
            loop = asyncio.get_running_loop()
            self._follow = loop.call_later(FOLLOWED_S, self._enqueue_rows)

    def _await_deadline(self, full: bool) -> None:
        """Have a tick come when something is due; on a disk that is `full`, after a while."""
        deadline = self.now() if self._returning else self.glance.deadline
        # One that waits already is late enough; another would be due at once, and wait as well.
        waits = any(isinstance(call.event, ev.Ticked | ev.Returned) for call in self._waiting)
        self._schedule(None if waits else deadline, RETRY_FULL_DISK_S if full else 0.0)

    def _commit(self, calls: list[Call], wait: bool) -> Glance:
        """In the writer's thread. Raises what no restart may ignore."""
        try:
            return self._books.commit(calls, wait)
        except CancelledError as error:  # asyncio would take it for the end of the writer's own task, unheard
            raise RuntimeError("what a commit needed was cancelled") from error
        except StopIteration as error:  # no future carries it: whoever waits would wait for ever
            raise RuntimeError("a commit ended in a StopIteration") from error

    def _hear_of_room(self, answered: Sequence[Call]) -> None:
        """Of updates their intake does: what is large of them is not in the event."""
        for call in answered:
            if isinstance(call.event, ev.UpdateArrived | ev.Returned | None):
                continue
            if isinstance(call.error, StoreFull):
                self.room.lacks(call.error)
            elif call.seq is not None:
                self.room.took()

    def _has_returned(self, error: BaseException | None) -> None:
        """Say once that the log has no room for the return, and once that it had."""
        said, self._returning = self._cannot_return, error is not None
        self._cannot_return = self._returning
        if self._returning and not said:
            log.warning("no lease ends until the disk takes the server's return, tried again: %s", error)
        elif said and not self._returning:
            log.info("the disk has room again: the open leases begin anew")

    async def _gather(self, deadline: Deadline) -> list[Call] | None:
        """The next batch; None when the queue is at its end.

        It waits a little for as many calls as the last batch had, and as came while that was committed: who
        was answered together asks together, and a commit costs much the same for one as for many. Without
        those who came meanwhile a fleet would stay in two halves, and each half would wait for the other's.
        `ENOUGH_BYTES` wait for nobody: to write them takes longer than what would be saved, and the loop
        receives meanwhile.
        """
        batch: list[Call] = []
        size_bytes = 0
        call = await self._queue.get()
        latest = asyncio.get_running_loop().time() + self._limits.commit_wait_s
        while call is not None:
            batch.append(call)
            size_bytes += len(call.inline or b"")
            if len(batch) >= self._limits.commit_events_max:
                break
            if not self._queue.empty():
                call = self._queue.get_nowait()
            elif size_bytes >= ENOUGH_BYTES or (len(batch) >= self._company and not self.coming):
                break
            else:
                try:
                    with deadline.until(latest):
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

    def _fail(self, batch: list[Call], error: BaseException) -> None:
        self.give_up(error)
        ending, self._waiting = False, []
        while not self._queue.empty():
            if (waiting := self._queue.get_nowait()) is None:
                ending = True
            else:
                batch.append(waiting)
        for call in batch:
            call.error = Unavailable(STOPPED)
            call.settle()
        if ending:
            self._queue.put_nowait(None)  # `close` waits for the end of the queue

    def _schedule(self, deadline: float | None, at_least_s: float = 0.0) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        if deadline is not None and not self._closing:
            delay_s = max(at_least_s, deadline - self.now())
            self._tick = asyncio.get_running_loop().call_later(delay_s, self._enqueue_tick)

    def _enqueue_tick(self) -> None:
        self._tick = None
        now = self.now()
        self._queue.put_nowait(Call(ev.Returned(now) if self._returning else ev.Ticked(now)))

    def _enqueue_rows(self) -> None:
        """Have the rows written that lack something of the log."""
        self._follow = None
        self._queue.put_nowait(Call(None, look=lambda _: self._books.project()))
