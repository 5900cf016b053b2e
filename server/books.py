"""What the writer's thread does: the store and the engine in step, one batch after the other.

What needs no journal is answered; the rest is appended to the store in one commit, and only then given
to the engine. Nothing else may touch either.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from anabranch.core import events as ev
from anabranch.core.effects import Effect, Granted, Published
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.waiting import WaitingLine
from anabranch.core.errors import AnabranchError, StoreCorrupt, StoreFull
from anabranch.core.journal import to_record
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.params import digest
from anabranch.core.model.updates import Receipt, Task
from anabranch.core.parts import answer_text
from anabranch.core.retention import ALL, Keep
from anabranch.host.rollback import Folding, Refolder
from anabranch.host.run import Run, Settlement
from anabranch.server.failpoints import reach
from anabranch.server.glance import Glance, Glances
from anabranch.server.history import History
from anabranch.server.long_parts import LongParts
from anabranch.server.metrics import Measure, Metrics
from anabranch.server.models import DIGEST_BYTES_MAX, Models
from anabranch.server.saving import Every, PendingSnapshot, SavedPoint, Saving, SnapshotFile
from anabranch.server.store.base import NOT_NOW, DiskFailed, Entry, Projection, Store
from anabranch.support.tracing import here, span_of

log = logging.getLogger(__name__)

TWICE = (
    "%s is run by two processes at a time, perhaps from copies of one folder: one works, the other waits. "
    "Stop one of them, or give it an --id and a --state-dir of its own"
)

ENDED_MAX = 100_000  # tasks that came to nothing, and are not granted again
TRIMMED_AT_ONCE = 1_000  # events, with every batch while there are any to drop
TRIMMED_AGAIN_S = 10.0  # after it could not be done


@dataclass(frozen=True)
class Answer:
    """What came of an event. `seq`: its place in the log, None where nothing was logged."""

    seq: int | None
    effects: Sequence[Effect]


@dataclass
class Call:
    """One turn of the queue: an event to log, or a look at the engine.

    `ahead`: it passes those that are not. `behind`: what it follows up, and fails with.
    """

    event: ev.Event | None
    inline: bytes | None = None
    look: Callable[[Engine], Any] | None = None
    folding: Folding | None = None
    ahead: bool = False
    behind: Call | None = None
    future: asyncio.Future[Any] | None = None
    seq: int | None = None
    effects: list[Effect] = field(default_factory=list)
    value: Any = None
    error: BaseException | None = None
    queued_at: float = field(default_factory=time.perf_counter)
    trace: Any = field(default_factory=here)  # the span that it came in, if its update is traced

    def take(self, found: Settlement) -> bool:
        """Note what the event comes to; whether that is for the log."""
        self.event, self.effects, self.error = found.event or self.event, found.effects, found.error
        return found.event is not None

    def settle(self) -> None:
        """Tell the caller, unless it went away."""
        if self.future is None or self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value if self.event is None else Answer(self.seq, self.effects))


class Books:
    """What happens in the writer's thread. Only that thread may call its methods."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        models: Models,
        every: Every,
        seq: int,
        saved: SavedPoint,
        history: History,
        limits: Limits = DEFAULT_LIMITS,
        keep: Keep = ALL,
        metrics: Metrics | None = None,
    ) -> None:
        self.metrics = metrics or Metrics()
        self.run = Run(engine, line := WaitingLine(limits, ended_max=ENDED_MAX), limits, self._stored)
        self.engine, self.line, self.glances = engine, line, Glances(engine)
        self.store, self.models, self.history = store, models, history
        self.seq = seq
        self.refold: Refolder | None = None
        self._projections: list[Projection] = []
        self.saving = Saving(engine, store, every, saved, keep)
        self._forgets = not keep.is_all
        self._start_keep: Keep | None = keep
        # A server before this one may have been killed while it dropped.
        self._trims, self._trims_at = self._forgets, 0.0
        self._trims_failing = _Failing("nothing was dropped of the log")
        self._saves_failing = _Failing("no snapshot was written")
        self.long_parts = LongParts(engine)
        # Of the newest batch: who has an answer, in the order of the log, and who waits.
        self.answered: list[Call] = []
        self.waiting: list[Call] = []

    def commit(self, batch: Sequence[Call], wait: bool = False) -> Glance:
        """Answer a batch; returns how the run stands then. Raises what no restart may ignore.

        Behind a long part some of it waits, and comes first in the next batch. `wait`: for that part.
        """
        reach("batch_taken")
        with self._without_snapshot():
            self._name_snapshot()
        self.waiting, self.answered = list(batch), []
        while True:
            turn, self.waiting = self.long_parts.turn(self.waiting, wait) if self.waiting else ([], [])
            self._take(turn)
            self.answered += turn
            if not (turn and self.waiting):
                break
        self.long_parts.forget()
        reach("answers_ready")
        return self.glances.take()

    def _take(self, batch: list[Call]) -> None:
        """Answer those whose turn it is: events, then rollbacks, then who looks."""
        began, began_ns = time.perf_counter(), time.time_ns()
        self.run.begin(call.event for call in (*batch, *self.waiting) if call.event is not None)
        logged = [call for call in batch if self._is_to_log(call)]
        if logged:
            self._log(logged)
        for call in batch:
            if call.folding is not None:
                self._roll_back(call, max((c.event.now for c in logged if c.event is not None), default=0.0))
        for call in batch:
            if call.look is not None:
                self._look(call)
        while self.line.sessions.news:
            log.warning(TWICE, self.line.sessions.news.pop())
        if logged:
            self.metrics.batch_events.add(len(logged))
            self.metrics.commit_s.add(time.perf_counter() - began)
            for call in logged:
                span_of("commit", call.trace, began_ns, events=len(logged))

    def _is_to_log(self, call: Call) -> bool:
        """Settle what the event of a call comes to, if it has one; whether that is for the log by now.

        A rollback has its event once it is folded.
        """
        if call.event is None or call.folding is not None:
            return False
        if call.behind is not None and call.behind.error is not None:
            # An ask behind an update that is not in the log would end the update's own task.
            call.error = call.behind.error
            return False
        return call.take(self.run.settle(call.event))

    def project(self) -> None:
        """Write what the log implies, all of it."""
        self._append([])

    def flush(self, now: float) -> None:
        """Write what the log implies, and a snapshot if there is anything new."""
        with self._without_snapshot():
            self.project()
            if self.seq > self.saving.saved.seq:
                self.save(now)

    def save(self, now: float) -> None:
        """Write a snapshot of the engine as it is, and wait for it. Raises those of `NOT_NOW`."""
        self._name_snapshot(wait=True)
        self.begin_snapshot(now)
        self._name_snapshot(wait=True)

    def begin_snapshot(self, now: float) -> None:
        """Take a snapshot of the engine as it is, and have it written. Raises those of `NOT_NOW`."""
        # The projections of all that the snapshot covers come first: nobody would write them after it.
        self.project()
        self.saving.begin(self.seq, now)

    def _name_snapshot(self, wait: bool = False) -> None:
        """Name the snapshot that is written, if there is one. Raises those of `NOT_NOW`."""
        if self.saving.finish(self._project_digests, wait):
            self._trims = self._forgets
            self._saves_failing.over()

    def _project_digests(self, taken: PendingSnapshot, written: SnapshotFile) -> None:
        if written.digests:
            self._projections.append(Projection(taken.saved.seq, taken.at, (), written.digests))
            self.project()

    @contextmanager
    def _without_snapshot(self) -> Iterator[None]:
        """Go on where none can be written now: the log has it all, and a later batch tries again."""
        try:
            yield
        except NOT_NOW as error:
            self._saves_failing.again(error)

    def begin_rollback(self, event: ev.RolledBack) -> Folding:
        """The fold that the rollback needs. Raises `UnknownVersion`, `ConfigError`."""
        assert self.refold is not None, "this writer was not told how to fold the log"
        self.project()
        return self.refold.folding(event, self.seq, self.engine)

    def _roll_back(self, call: Call, earliest: float) -> None:
        """Log a rollback once its state is known, and write a snapshot: it took the whole log to make.

        It is no earlier than what came behind it in the queue and is logged before it.
        """
        assert call.folding is not None, "a rollback comes with its fold"
        assert call.event is not None, "and is an event"
        try:
            if self._trims and self.store.first().snapshot is None:
                self._trim()  # first: a replay will fold from where the log begins then
            call.event = event = call.folding.finish(self.seq + 1, max(call.event.now, earliest))
        except DiskFailed:
            raise
        except AnabranchError as error:
            call.error = error
            return
        self._log([call])
        if call.error is None:
            self.flush(event.now)

    def _look(self, call: Call) -> None:
        assert call.look is not None
        try:
            call.value = call.look(self.engine)
        except DiskFailed:
            raise
        except AnabranchError as error:
            call.error = error

    def _log(self, calls: list[Call]) -> None:
        entries = [Entry(to_record(c.event), c.inline) for c in calls if c.event is not None]
        try:
            seqs = self._append(entries)
        except StoreFull as full:
            for call in calls:
                call.error = full
            self._trim_if_due()  # it makes room
            return
        before = self.seq
        for call, seq, entry in zip(calls, seqs, entries, strict=True):
            self._apply(call, seq, entry)
        if self.seq > before:
            with _timed(self.metrics.fsync_s):
                self.store.acknowledge(self.history.mark(self.seq))
        self.models.retain(self.engine.ledger.bases)
        self.models.retain_parts(self.engine.ledger.tasks)
        if calls[-1].event is not None:
            self._save_if_due(calls[-1].event.now)
        self._trim_if_due()

    def _trim(self) -> None:
        """Drop a piece of what need not be kept of the log. Raises those of `NOT_NOW`, and `StoreCorrupt`."""
        if self._start_keep is not None:  # that of this start: until there is room, no snapshot goes by it
            self.store.retain(self._start_keep)
            self._start_keep = None
        self._trims = self.store.trim(TRIMMED_AT_ONCE) > 0
        self._trims_failing.over()

    def _trim_if_due(self) -> None:
        """The same, where it can be done."""
        if not self._trims or time.monotonic() < self._trims_at:
            return
        try:
            self._trim()
        except (*NOT_NOW, StoreCorrupt) as error:  # no room to make room, or no archive of what is damaged
            self._trims_failing.again(error)
            self._trims_at = time.monotonic() + TRIMMED_AGAIN_S

    def _append(self, entries: list[Entry]) -> list[int | None]:
        if not entries and not self._projections:
            self.store.append([])  # what it was given before may wait for its rows
            return []
        with _timed(self.metrics.append_s):
            seqs = self.store.append(entries, self._projections)
        if not isinstance(seqs, list | tuple) or len(seqs) != len(entries):  # of a store of somebody's own
            raise DiskFailed(
                f"the store's append must give a list of {len(entries)} sequence numbers, as many as there "
                f"are entries, not {answer_text(seqs)}"
            )
        self._projections = []
        return seqs

    def _apply(self, call: Call, seq: int | None, entry: Entry) -> None:
        assert call.event is not None
        beforehand = self.long_parts.of(call)
        if seq is None:  # in the log from long ago: the engine has forgotten it, the store has not
            assert isinstance(call.event, ev.UpdateArrived)
            call.take(self.run.repeat(call.event))
            return
        self.seq = call.seq = seq
        began, began_ns = time.perf_counter(), time.time_ns()
        call.effects = self.run.apply(Settlement(call.event, call.effects), beforehand)
        if isinstance(call.event, ev.UpdateArrived):
            self.metrics.fold_s.add(time.perf_counter() - began)
            span_of("fold", call.trace, began_ns)
        reach("handled")
        digests, links = {}, self.history.follow(entry.line, call.effects)
        for effect in call.effects:
            if isinstance(effect, Granted):
                self._keep(call.event, effect.task)
            elif isinstance(effect, Published):
                if effect.vector.nbytes <= DIGEST_BYTES_MAX:
                    digests[effect.version] = digest(effect.vector)
                self.models.published(effect.version, call.event.now, digests.get(effect.version, ""))
        self._projections.append(Projection(seq, call.event.now, call.effects, digests, links))

    def _keep(self, event: ev.Event, task: Task) -> None:
        """Have the task's model made, for what its device holds and can decode."""
        assert isinstance(event, ev.TaskAsked), "a task comes of an ask"
        codecs = self.engine.ledger.clients[task.client_id].capability.codecs
        wanted = self.models.for_device(task.base_version, event.ask.holds, codecs, task.submodel)
        self.models.keep(self.engine, wanted)

    def _stored(self, update_id: str) -> Receipt | None:
        self.project()
        return self.store.receipt(update_id)

    def _save_if_due(self, now: float) -> None:
        if not self.saving.is_due(self.seq):
            return
        with self._without_snapshot():
            self.begin_snapshot(now)
            self._name_snapshot()


class _Failing:
    """What fails one time after the other: a warning at the first, the second, the fourth and so on."""

    def __init__(self, what: str) -> None:
        self._what, self._times = what, 0

    def again(self, error: Exception) -> None:
        """Once more."""
        self._times += 1
        if self._times.bit_count() == 1:
            log.warning("%s: %s", self._what, error)

    def over(self) -> None:
        """It did not fail."""
        self._times = 0


@contextmanager
def _timed(measure: Measure) -> Iterator[None]:
    """Inside is what takes the time. What fails is not measured."""
    began = time.perf_counter()
    yield
    measure.add(time.perf_counter() - began)
