"""Rollback: the state that the log gives when some updates after a version are left out.

Nothing in the log is taken back. A rollback is an event like any other, and the version that it publishes has
the next number, so nobody ever sees two models under one number. What it publishes is defined by the log:

    the fold of the updates that count, each on arrival and against the version that its task was granted with

An update counts unless it was told `rejected`, or is left out. It is left out by a rollback to version v if
its place in the log is after the event that published v and before the rollback, and if it is of one of the
clients that the rollback is `without`; with `everyone`, whoever it is of. So several rollbacks add up.

A log that is not kept whole begins with a snapshot (`core/retention.py`), and then so does the fold: what the
snapshot has folded counts, and no version before it can be gone back to. Tasks that were open then are as if
they had just been granted.

In the fold versions have other numbers than they had, because fewer updates make fewer versions; an update's
base is the version of the fold in which its task was granted. Nothing is decided anew that was decided once:
who got a task, which part of the model it was of, what was too late. Settings
that were changed while the run went on hold from their place in the log on, and stay. Rounds cannot be folded
anew, since their cohorts were drawn for the versions that there were.

An order of an older release (`rules` 0) leads to what it led to then, as versions and snapshots came of it: a
log that begins in a pause stays in it, and no strategy is told of tasks that have ended.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from anabranch.core import events as ev
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.outcome import in_doubt
from anabranch.core.errors import ConfigError, StoreCorrupt, UnknownVersion
from anabranch.core.journal import Record, from_record
from anabranch.core.model.updates import Receipt, Task, TaskState, Verdict
from anabranch.host.build import Begin
from anabranch.host.log import Log
from anabranch.host.submission import loader

# Every task of the fold is one that was granted, and is answered in the end: no bound may stand in its way.
UNBOUNDED: Mapping[str, Any] = {
    "admits_all": True,
    "any_submodel": True,
    "tasks_per_client": 1 << 62,
    "staleness_max": 0,
    "versions_max": 0,
    "updates_max": 0,
    "flaws_max": 0,
    "rejections_max": 0,
    "lease_s": math.inf,
    "lease_min_s": math.inf,
    "lease_max_s": math.inf,
}


def check_rollback(engine: Engine, event: ev.RolledBack) -> None:
    """Whether a run can be rolled back so. Raises `UnknownVersion`, `ConfigError`."""
    if not engine.strategy.rolls_back:
        why = (
            "works in rounds, whose cohorts were drawn"
            if engine.strategy.synchronous
            else "goes by who trained beside whom, which no update says"
        )
        raise ConfigError(f"strategy {engine.strategy.name!r} {why}: no update can be left out")
    if engine.sums is not None:
        raise ConfigError(
            "a private run cannot be rolled back: the same updates in other sums would show the difference; "
            "start another run from the model of that version"
        )
    if engine.cohorts is not None and event.without:
        raise ConfigError(
            "without: a run with masked sums cannot be rolled back without some clients, as nobody can take "
            "their updates out of a sum: set everyone, which goes back to the version itself"
        )
    if not 0 <= event.to_version <= engine.version:
        raise UnknownVersion(f"version {event.to_version} is not published: the newest is {engine.version}")
    if not event.without and not event.everyone:
        raise ConfigError("without: name a client whose updates are left out, or set everyone")
    for client_id in event.without:
        if client_id not in engine.ledger.clients:
            raise ConfigError(f"without: client {client_id!r} is not enrolled")


@dataclass(frozen=True)
class _Counting:
    """An update that counts: its place in the log, and whose it is."""

    update_id: str
    client_id: str
    seq: int


@dataclass(frozen=True)
class Refolder:
    """Makes the state of a rollback, of a log and of what makes the engine with which that begins.

    `receipt` is what an update was told, where the engine has forgotten it; `published` the event of a
    version, None where the log does not have it. Who has no such index need not roll back, only replay.
    """

    log: Log
    begin: Begin
    receipt: Callable[[str], Receipt | None] = lambda _: None
    published: Callable[[int], int | None] = lambda _: None

    def folding(self, event: ev.RolledBack, seq: int, engine: Engine) -> Folding:
        """The fold of a rollback that was asked for when event `seq` was the last, with its place in the log.

        Raises `UnknownVersion`, `ConfigError`.
        """
        check_rollback(engine, event)
        found, to_seq = self.log.first(), self.published(event.to_version) or 0
        if found.snapshot is not None and to_seq < found.applied_through_seq:
            first = found.snapshot.meta["version"] + 1
            raise UnknownVersion(
                f"version {event.to_version} cannot be gone back to: the log begins with event "
                f"{found.applied_through_seq + 1} (server.keep), so from version {first} on"
            )
        return Folding(self, replace(event, to_seq=to_seq), seq, engine)

    def __call__(self, event: ev.RolledBack, seq: int, engine: Engine) -> ev.RolledBack:
        """The event with its state; `seq` is its place in the log, `engine` the one it is for.

        The new engine shares nothing with the old. Raises `StoreCorrupt` where the payload of an update that
        counts is gone.
        """
        return Folding(self, event, seq - 1, engine).finish(seq, event.now)

    def was_rejected(self, record: Record, engine: Engine) -> bool:
        """Whether the update of a record was told so."""
        told = engine.ledger.receipts.get(record["update_id"]) or self.receipt(record["update_id"])
        return bool(record["flaw"]) or (told is not None and told.decision.verdict is Verdict.REJECTED)


class Folding:
    """A fold in steps, between which the run may go on. `engine` has handled the log up to `seq`."""

    def __init__(self, refolder: Refolder, event: ev.RolledBack, seq: int, engine: Engine) -> None:
        self._refolder, self._event, self._engine = refolder, event, engine
        self._load_delta = loader(refolder.log.payload, engine.spec)
        found = refolder.log.first()
        self._fold = refolder.begin(found.snapshot)
        self._begins, self._begins_at = found.applied_through_seq, found.taken_at
        self._seq, self._others = self._begins, 0
        # Tasks that had expired where the log begins: the strategy was told.
        self._told = {t.task_id for t in self._fold.ledger.tasks.values() if t.state is TaskState.EXPIRED}
        if engine.cohorts is not None:  # sums cannot be made of other updates: what there was comes again
            self._steps = self._again()
            return
        self._fold.settings = replace(self._fold.settings, **UNBOUNDED)
        if event.rules:
            self._fold.paused = False  # as it may be where the log begins: who got a task got it
        self._fold.planner = None  # updates say what they cover
        # Who has a task now may answer it before the end.
        self._steps = self._up_to(seq, set(engine.ledger.tasks))

    def advance(self, events: int) -> bool:
        """Look at so many events; whether there is more to do. Raises as `Refolder` does."""
        try:
            return sum(1 for _ in itertools.islice(self._steps, events)) == events
        except StoreCorrupt:
            if not self._has_moved:
                raise
            return False  # what was to come is dropped

    def finish(self, seq: int, now: float) -> ev.RolledBack:
        """Fold what is left; the event with its state, at the place `seq` and the time of the log.

        Raises as `Refolder` does, and where the log has left the version behind meanwhile as its `folding`.
        """
        self._event = replace(self._event, now=now)
        if self._has_moved:  # a replay will begin there
            return self._refolder.folding(self._event, seq - 1, self._engine).finish(seq, now)
        for _ in self._steps:
            pass
        if self._engine.cohorts is not None:
            return replace(self._event, fold=self._fold)
        others = self._others
        for _ in self._up_to(seq - 1, self._engine.ledger.tasks):
            pass
        if self._others > others:  # another rollback came first: what counts is not what it was
            return self._refolder(self._event, seq, self._engine)
        if self._event.rules:
            self._end_closed()
        return replace(self._event, fold=self._fold)

    @property
    def _has_moved(self) -> bool:
        """Whether the log, which is not kept whole, begins elsewhere by now."""
        return self._refolder.log.first().applied_through_seq != self._begins

    def _end_closed(self) -> None:
        """Tasks that were open when the fold began and have ended, or end now, end in it too."""
        ledger, event = self._fold.ledger, self._event
        live = {t.task_id for t in self._engine.ledger.leased() if t.client_id not in event.without}
        live -= {t.task_id for t in in_doubt(event, self._engine)}
        for task in [t for t in ledger.tasks.values() if t.task_id not in live]:
            if task.task_id in self._told:
                ledger.close(task)
            else:
                self._end(task, event.now)

    def _end(self, task: Task, now: float) -> None:
        self._fold.handle(ev.TaskDropped(now, task.client_id, task.task_id, ""))

    def _again(self) -> Iterator[None]:
        """Everything as it was, up to the version that is gone back to, in steps."""
        for place, record in self._records(self._event.to_seq):
            event = from_record(record, self._fold.spec, self._load_delta)
            if isinstance(event, ev.RolledBack):
                event = self._refolder(event, place, self._fold)
            self._fold.handle(event)
            yield

    def _up_to(self, seq: int, open_tasks: Collection[str]) -> Iterator[None]:
        """Fold the events up to and with `seq`, in steps."""
        counting: dict[str, _Counting] = {}
        for place, record in self._records(seq):
            if record["kind"] == "update" and not self._refolder.was_rejected(record, self._engine):
                counting[record["task_id"]] = _Counting(record["update_id"], record["client_id"], place)
            elif record["kind"] == "rolled_back":
                self._others += 1
                counting = _without(counting, record["to_seq"], record["without"], record["everyone"])
            yield
        counting = _without(counting, self._event.to_seq, self._event.without, self._event.everyone)
        if self._seq == self._begins:
            self._keep_open({*counting, *open_tasks})
        for place, record in self._records(seq):
            self._take(place, record, counting, open_tasks)
            yield
        self._seq = max(self._seq, seq)

    def _keep_open(self, wanted: Collection[str]) -> None:
        """Of the tasks that the fold began with: those that are answered in the end stay open until then."""
        ledger = self._fold.ledger
        for task in list(ledger.tasks.values()):
            if task.task_id in wanted:
                ledger.replace(replace(task, state=TaskState.LEASED, expires_at=math.inf))
            elif self._event.rules:
                self._end(task, self._begins_at)
            else:
                ledger.close(task)

    def _records(self, seq: int) -> Iterator[tuple[int, Record]]:
        for place, record in self._refolder.log.records(self._seq):
            if place > seq:
                return
            yield place, record

    def _take(
        self, place: int, record: Record, counting: Mapping[str, _Counting], open_tasks: Collection[str]
    ) -> None:
        fold, load_delta = self._fold, self._load_delta
        task_id = record.get("task_id", "")
        match record["kind"]:
            case "enrolled" | "ticked":
                fold.handle(from_record(record, fold.spec, load_delta))
            case "asked" if task_id in counting or task_id in open_tasks:
                fold.handle(from_record(record, fold.spec, load_delta))
            case "settings_changed":
                fold.handle(self._settings(record))
            case "update" if task_id in counting and counting[task_id].seq == place:
                fold.handle(self._update(record, place))

    def _settings(self, record: Record) -> ev.Event:
        """A change of settings as the fold takes it: without what bounds tasks."""
        values = {p: v for p, v in record["values"].items() if p.partition(".")[2] not in UNBOUNDED}
        return from_record({**record, "values": values}, self._fold.spec, self._load_delta)

    def _update(self, record: Record, place: int) -> ev.Event:
        """An update as the fold takes it: of its task's base."""
        task = self._fold.ledger.tasks.get(record["task_id"])
        base = record["base_version"] if task is None else task.base_version
        try:
            return from_record({**record, "base_version": base}, self._fold.spec, self._load_delta)
        except StoreCorrupt as error:
            raise StoreCorrupt(
                f"event {place}: a rollback needs the payload of every update that counts, but that of "
                f"{record['update_id']} is gone: {error}"
            ) from error


def _without(
    counting: dict[str, _Counting], to_seq: int, without: Collection[str], everyone: bool
) -> dict[str, _Counting]:
    """What of it is not left out by a rollback."""
    return {
        task_id: c
        for task_id, c in counting.items()
        if c.seq <= to_seq or not (everyone or c.client_id in without)
    }
