"""Snapshots of a run that goes on: taken and named in the writer's thread, written between by another one.

What is taken is a copy, or lent by the engine, which may change at once. The file is durable before the row
that names it, and until then the log is read from the snapshot before. One is written at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from anabranch.core.engine.engine import Engine
from anabranch.core.engine.ledger import Unsaved
from anabranch.core.model.params import digest
from anabranch.core.retention import Keep
from anabranch.core.snapshot import VECTOR, Snapshot, take_changes
from anabranch.server.store.base import NOT_NOW, Store

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# A snapshot costs processor and disk: the next one waits until it would take at most a part in
# so many of the time.
SAVING_SHARE = 20


@dataclass(frozen=True)
class SavedPoint:
    """How far the newest snapshot goes: events, versions and applied updates."""

    seq: int = 0
    version: int = 0
    applied: int = 0


@dataclass(frozen=True)
class Every:
    """How far the log may go on after a snapshot until the next one is due; 0: as far as it likes."""

    versions: int = 0
    updates: int = 0
    events: int = 0

    def due(self, versions: int, updates: int, events: int) -> bool:
        """Whether it has gone so far."""
        gone = ((self.versions, versions), (self.updates, updates), (self.events, events))
        return any(0 < bound <= found for bound, found in gone)


@dataclass(frozen=True)
class SnapshotFile:
    """The file of a snapshot, and the digest of its vector where the version has none on record."""

    sha256: str
    digests: dict[int, str]


@dataclass(frozen=True)
class PendingSnapshot:
    """A snapshot that is being written: of which state, and what of the books was in none before."""

    snapshot: Snapshot
    at: float
    saved: SavedPoint
    unsaved: Unsaved
    began: float
    writing: Future[SnapshotFile]


class AtOnce(Executor):
    """Runs what it is given before it returns: nothing goes on meanwhile."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The outcome, which is there."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - it is whoever asks for the outcome who gets it
            future.set_exception(error)
        return future


class Saving:
    """Takes and names a run's snapshots; the files are written by another thread in between.

    All methods are for the writer's thread; `written` is called in the other one.
    """

    def __init__(self, engine: Engine, store: Store, every: Every, saved: SavedPoint, keep: Keep) -> None:
        self._engine, self._store, self._every, self._keep = engine, store, every, keep
        self.saved = saved
        self.executor: Executor = AtOnce()
        self.clock: Callable[[], float] = time.perf_counter
        self.written: Callable[[], None] = lambda: None
        self._taken: PendingSnapshot | None = None
        self._not_before = 0.0

    def is_due(self, seq: int) -> bool:
        """Whether it is time for the next one, and none is being written."""
        versions = self._engine.version - self.saved.version
        updates = self._engine.counters.applied - self.saved.applied
        due = self._every.due(versions, updates, seq - self.saved.seq)
        return due and self._taken is None and self.clock() >= self._not_before

    def begin(self, seq: int, now: float) -> None:
        """Take one and have it written. All that the log implies up to event `seq` must be in the store."""
        assert self._taken is None, "one is written at a time"
        engine, began = self._engine, self.clock()
        snapshot, unsaved = take_changes(engine), engine.ledger.unsaved
        assert unsaved is not None, "a ledger that is saved in pieces notes what changed"
        engine.ledger.track(saved=True)
        rate = engine.version > self.saved.version
        saved = SavedPoint(seq, engine.version, engine.counters.applied)
        writing = self.executor.submit(self._write, snapshot, rate)
        self._taken = PendingSnapshot(snapshot, now, saved, unsaved, began, writing)
        writing.add_done_callback(lambda _: self.written())

    def _write(self, snapshot: Snapshot, with_digest: bool) -> SnapshotFile:
        sha256 = self._store.write_snapshot(snapshot)
        version = snapshot.meta["version"]
        return SnapshotFile(sha256, {version: digest(snapshot.arrays[VECTOR])} if with_digest else {})

    def finish(self, project: Callable[[PendingSnapshot, SnapshotFile], None], wait: bool = False) -> bool:
        """Name what was taken, once it is written; whether anything was named. Raises those of `NOT_NOW`.

        `project`: writes down what was found out of the version, and all else that comes first.
        """
        taken = self._taken
        if taken is None or not (wait or taken.writing.done()):
            return False
        self._taken = None
        try:
            written = taken.writing.result()
            project(taken, written)
            self._store.save_snapshot(taken.snapshot, taken.saved.seq, taken.at, self._keep, written.sha256)
        except NOT_NOW:
            self._engine.ledger.unsaved_after_all(taken.unsaved)
            raise
        finally:
            ended = self.clock()
            self._not_before = ended + SAVING_SHARE * (ended - taken.began)
        self.saved = taken.saved
        return True
