"""A store whose rows are in a database: what is the same on SQLite and on PostgreSQL.

What each of them has for itself, the log above all, is in `sqlite_store.py` and in `postgresql_store.py`. See
`base.py` for the laws.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, Select, bindparam, func, insert, or_, select

from anabranch.core.engine.shelf import check_row
from anabranch.core.errors import LogLost, StoreCorrupt, StoreError
from anabranch.core.events import Payload
from anabranch.core.journal import Record
from anabranch.core.limits import Limits
from anabranch.core.model.updates import Receipt
from anabranch.core.retention import ALL, Keep
from anabranch.core.secagg.ring import RING
from anabranch.core.snapshot import Snapshot
from anabranch.server.failpoints import reach
from anabranch.server.store import revision, rows, schema, trimming
from anabranch.server.store.archive import ARCHIVED_BYTES, Archive
from anabranch.server.store.base import Entry, Mark, Projection, Recovery, RunInfo, VersionRow
from anabranch.server.store.blobs import BlobStore
from anabranch.server.store.database import Database
from anabranch.server.store.ending import check_files, check_snapshots, log_end
from anabranch.server.store.files import (
    MISPLACED,
    REBUILDING,
    FolderLock,
    check_space,
    disk_errors,
    make_folder,
    stored_values,
)
from anabranch.server.store.ledger_rows import clear_rows, read_rows, write_rows
from anabranch.server.store.mark import MarkFile
from anabranch.server.store.packs import Packs, named_files, read_payload
from anabranch.server.store.problems import find_problems, snapshot_problems
from anabranch.server.store.projections import upsert
from anabranch.server.store.quota import Quota
from anabranch.server.store.schema import events, mask_sums, runs, snapshots, updates
from anabranch.server.store.snapshots import SnapshotFiles, named_by
from anabranch.server.store.tags import read_tags, write_tags
from anabranch.server.store.versions import read_links, read_metrics, read_versions
from anabranch.support.shelf import RowShelf

BEGINS_LATE = "does not begin with its first event (server.keep): restore a backup"
PAGE = 500  # events read at a time
# Written once: to write a statement costs more than to carry it out.
_PAGE = (
    select(events.c.seq, events.c.record)
    .where(events.c.seq > bindparam("after"))
    .order_by(events.c.seq)
    .limit(PAGE)
)
_PAYLOAD, _MASK_SUM = (
    select(*(of.c[name] for name in ("payload", "pack", "pack_offset", "size_bytes", "sha256")))
    .where(of.c.sha256 == bindparam("sha256"))
    .where(or_(of.c.payload.is_not(None), of.c.pack.is_not(None)))
    .limit(1)
    for of in (updates, mask_sums)
)

log = logging.getLogger(__name__)


class SqlStore(ABC):
    """What is common to the `Store`s of base.py that have a database.

    `data_dir` has the lock, the mark and uploads on their way. `archive`: the folder for what the log drops,
    None: it is lost. `disk_bytes_max`: of `data_dir`.
    """

    _database: Database
    _blobs: BlobStore
    _snapshots: SnapshotFiles
    shelf: RowShelf

    def __init__(self, data_dir: Path, limits: Limits, archive: Path | None, disk_bytes_max: int) -> None:
        self._quota = Quota(data_dir, disk_bytes_max)
        self._data_dir, self._limits, self.archive_folder = data_dir, limits, archive
        self._archive: Archive | None = None
        self._packs, self._marks = Packs(data_dir), MarkFile(data_dir)
        self._has_blake3 = False
        self._lock: FolderLock | None = None
        self._last_seq = 0
        self._is_ahead = False  # a snapshot is of a version that no row has published
        self._begin = 0  # the event that the log may begin with
        self._dropped: set[str] = set()  # payloads of events that are gone, which are files still
        self._dropping = trimming.Progress()

    @property
    def blobs(self) -> BlobStore:
        """Where uploads and large payloads lie."""
        return self._blobs

    # --- what each of them has for itself ----------------------------------------------------

    @abstractmethod
    def append(self, entries: Sequence[Entry], projections: Sequence[Projection] = ()) -> list[int | None]:
        """Make events durable, and see to the projections of earlier ones."""

    @abstractmethod
    def _see_all(self) -> None:
        """Before a look, or a change: rows are to have all that is in the log."""

    @abstractmethod
    def _begin_log(self, stored: RunInfo) -> None:
        """At a start, once nobody else writes: it is to be whole, and the rows to have all of it."""

    @abstractmethod
    def _check_log(self, mark: Mark | None) -> None:
        """Raises `LogLost` where the log ends before what is known to have been in it. Writes nothing."""

    @abstractmethod
    def _end_log(self, run_id: str, end: int) -> None:
        """By an operator's word: the log ends with event `end`, whatever lies behind it."""

    @abstractmethod
    def _snapshots_ahead(self, connection: Connection) -> list[str]:
        """The digests of snapshots of versions that no row has published, if there may be such."""

    @abstractmethod
    def _file_problems(self, connection: Connection) -> Iterator[str]:
        """What is wrong with files of the log and of the database, in words."""

    @abstractmethod
    def _tell_missing(self, blobs: set[str], packs: set[int]) -> None:
        """Say which of the files of payloads that rows name are not there."""

    # --- the run -----------------------------------------------------------------------------

    def info(self) -> RunInfo | None:
        """The run that is stored, if there is one. Raises `StoreNewer`."""
        found = None
        if self._database.exists():
            with self._reading() as connection:
                if revision.has_tables(connection):
                    found = connection.execute(select(runs)).mappings().first()
        return None if found is None else rows.info_of(dict(found))

    def start(self, info: RunInfo) -> RunInfo:
        """Lock, bring the tables up to date, and enter the run or find it. See base.py for errors."""
        with disk_errors("making the data directory", (*MISPLACED, errno.ENOENT)):
            make_folder(self._data_dir)
        self._lock = FolderLock(self._data_dir)
        shutil.rmtree(self._data_dir / REBUILDING, ignore_errors=True)  # of one that was killed
        try:
            self._blobs.prepare()
            if gone := self._blobs.make_room():
                log.info("removed what had come of %d uploads", len(gone))
            check_space(self._data_dir, self._limits.free_disk_bytes_min, "and start the server again")
            self._open_to_write()
            with self._database.writing() as connection:
                revision.bring_up(connection)
                stored = self._enter(connection, info)
                self._last_seq = log_end(connection)
            self._begin_log(stored)
            self._snapshots.prepare()
            self._begin_shelf()
            if self.archive_folder is not None:
                self._archive = Archive(self.archive_folder, stored.run_id).prepared()
            self._collect_garbage(tell=True)
        except BaseException:
            self.close()
            raise
        return stored

    def close(self) -> None:
        """Flush and let go of files and locks, of each whatever becomes of those before it."""
        with ExitStack() as rest:
            rest.callback(self._unlock)
            rest.callback(self._marks.close)
            rest.callback(self._database.close)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _open_to_write(self) -> None:
        self._database.open(writes=True)

    def _enter(self, connection: Connection, info: RunInfo) -> RunInfo:
        row = connection.execute(select(runs)).mappings().first()
        if row is None:
            connection.execute(insert(runs), rows.run_row(info))
            return info
        stored = rows.info_of(dict(row))
        rows.check_same_run(stored, info, self._database.name)
        return stored

    def _check_whole(self) -> None:
        """Raises `LogLost` as `_check_log` does, if there is a run."""
        mark = self.mark()
        if self.info() is not None:
            self._check_log(mark)

    def _collect_garbage(self, tell: bool = False) -> None:
        """Remove the files that nothing names any more. `tell`: of those that rows name and that are gone."""
        with self._database.writing() as connection:
            referenced, packs = named_files(connection)
            kept = set(connection.scalars(select(snapshots.c.sha256)))
            ahead = self._snapshots_ahead(connection)
        self._is_ahead = bool(ahead)
        if tell:
            self._tell_missing(referenced, packs)
        if gone := self._blobs.collect_garbage(referenced):
            log.info("removed %d files that nothing references", len(gone))
        self._snapshots.remove_all_but(kept.union(ahead))

    def _begin_shelf(self) -> None:
        """Clear the shelf of what no snapshot names."""
        with self._database.writing() as connection:
            known = connection.execute(select(snapshots.c.sha256, snapshots.c.applied_through_seq)).all()
            ahead = self._snapshots_ahead(connection)
        events = {row.sha256: row.applied_through_seq for row in known}
        newest = max(events.values(), default=0)
        named: dict[int, set[str]] = {}
        clears = True
        for sha256, event in [*events.items(), *((sha256, newest) for sha256 in ahead)]:
            try:
                named.setdefault(event, set()).update(self._snapshots.names(sha256))
            except StoreCorrupt:  # perhaps it can be read later
                clears = False
        self.shelf.begin(named, clears)

    def _check_ahead(self) -> None:
        """After a replay: raises `LogLost` where a snapshot is of a version that no row has published."""
        with self._reading() as connection:
            check_files(connection, self._snapshots, self._database.name)
        self._collect_garbage()

    def _check_place(self) -> None:
        """Before anything is written, or removed, by name: raises as `FolderLock.check` does."""
        if (lock := self._lock) is not None:
            lock.check()

    # --- the log -----------------------------------------------------------------------------

    def _check_room(self, entries: Sequence[Entry]) -> None:
        """Before an `append`: raises `StoreFull`, and `DiskFailed` where the folder is another by now."""
        self._check_place()
        check_space(self._data_dir, self._limits.free_disk_bytes_min)
        if entries:  # what is in the log is written up, and dropped, whatever is held
            self._quota.check()

    def _are_named_anew(self, new: Sequence[tuple[int, Entry]]) -> bool:
        """Whether these entries are the first since the start that have a payload named by BLAKE3."""
        return not self._has_blake3 and any(rows.names_by_blake3(entry) for _, entry in new)

    @contextmanager
    def _committing(self) -> Iterator[Connection]:
        """A transaction for rows of events."""
        with self._database.writing() as connection:
            yield connection
        reach("committed")

    def _check_blobs(self, entries: Sequence[Entry], is_here: Callable[[str], bool]) -> None:
        arrived = [e.record for e in entries if rows.update_id_of(e) is not None and e.inline is None]
        for record in [record for record in arrived if not record["flaw"]]:
            if not is_here(record["payload"]["sha256"]):
                raise StoreError(f"the payload of update {record['update_id']!r} is no blob: adopt it first")

    def mark(self) -> Mark | None:
        """What `acknowledge` was told last, if anything. Raises `StoreCorrupt`."""
        return self._marks.read()

    def acknowledge(self, mark: Mark) -> None:
        """Remember, durably, that the log had come so far. The first one may raise `LogLost`."""
        if self._is_ahead:
            self._check_ahead()
        self._write_mark(mark)
        reach("marked")

    def _write_mark(self, mark: Mark) -> None:
        self._marks.write(mark)

    def disown(self) -> None:
        """Forget what `acknowledge` was told. Snapshots of lost versions are set aside, none is removed."""
        info = self.info()
        with self._reading() as connection:
            self._snapshots.set_aside(self._snapshots_ahead(connection))
            end = log_end(connection)
        if info is not None:
            self._end_log(info.run_id, end)
        self._marks.remove()

    def records(self, after: int = 0) -> Iterator[tuple[int, Record]]:
        """The log after an event, as far as it is kept."""
        with self._reading() as connection:
            begin = trimming.first_event(connection) - 1 if trimming.begins_late(connection) else 0
        yield from self._after(max(after, begin))

    def _after(self, seq: int) -> Iterator[tuple[int, Record]]:
        """Events above `seq`, a page at a time: no cursor stays open while others write."""
        while True:
            with self._reading() as connection:
                page = connection.execute(_PAGE, {"after": seq}).all()
            for row in page:
                seq += 1
                if row.seq != seq:
                    raise StoreCorrupt(f"event {seq} is not in the log, event {row.seq} is: restore a backup")
                with stored_values(f"event {seq} of the log"):
                    record = json.loads(row.record)
                yield seq, record
            if len(page) < PAGE:
                return

    # --- look-ups ----------------------------------------------------------------------------

    @contextmanager
    def _reading(self, anew: bool = True) -> Iterator[Connection]:
        """A look at all of the log; not `anew`: as it was when it was looked at last, or with more."""
        if not self._database.exists():
            raise StoreError(f"{self._database.name} does not exist: check data_dir")
        with stored_values(self._database.name):
            if anew:
                self._see_all()
            with self._database.transaction() as connection:
                yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A transaction on rows that have all of the log."""
        self._see_all()
        with self._database.writing() as connection:
            yield connection

    def payload(self, reference: Payload) -> bytes | memoryview:
        """The bytes of an update, or of a keeper's answer. Raises `StoreCorrupt`."""
        # A keeper's answer is of a ring; data of older releases have neither that nor the table.
        queries = (_PAYLOAD, _MASK_SUM) if reference.codec.startswith(RING) else (_PAYLOAD,)
        # A replay asks for one after the other: to look each time for what is new was most of the time.
        rows_seen = (self._payload_row(queries, reference.sha256, anew) for anew in (False, True))
        row = next((row for row in rows_seen if row is not None), None)
        return self._blobs.read(reference.sha256) if row is None else read_payload(row, self._packs)

    def _payload_row(self, queries: Sequence[Select[Any]], sha256: str, anew: bool) -> Row[Any] | None:
        with self._reading(anew) as connection:
            found = (connection.execute(query, {"sha256": sha256}).first() for query in queries)
            return next((row for row in found if row is not None), None)

    def receipt(self, update_id: str) -> Receipt | None:
        """What was decided of an update, from the projections."""
        with self._reading() as connection:
            query = select(updates).where(updates.c.update_id == update_id, updates.c.verdict.is_not(None))
            row = connection.execute(query).mappings().first()
            return None if row is None else rows.receipt_of_update(dict(row))

    def versions(self, after: int = 0, limit: int = 1000) -> list[VersionRow]:
        """Published versions above `after`, in order."""
        with self._reading() as connection:
            return read_versions(connection, after, limit)

    def links(self, after: int, limit: int) -> list[str]:
        """Links of the versions above `after`, in order and without a gap; of versions that are gone too."""
        with self._reading() as connection:
            return read_links(connection, after, limit)

    def metrics(self, version: int) -> dict[str, float]:
        """What was reported of a version, though the log has it no more."""
        with self._reading() as connection:
            return read_metrics(connection, version)

    def add_metrics(self, version: int, metrics: Mapping[str, float], at: float) -> None:
        """Metrics of a version; a later value replaces the earlier. Values not finite are left out."""
        with self._writing() as connection:
            upsert(connection, schema.metrics, rows.metric_rows(version, metrics, at))

    def tags(self) -> dict[str, tuple[str, ...]]:
        """The operators' notes on clients."""
        with self._reading() as connection:
            return read_tags(connection)

    def tag(self, client_ids: Sequence[str], add: Sequence[str], remove: Sequence[str]) -> None:
        """Give clients notes, and take others away."""
        with self._writing() as connection:
            write_tags(connection, client_ids, add, remove)

    def problems(self, after: int = 0) -> list[str]:
        """Every broken invariant of the stored data, in words; payloads only of later updates. Reads only."""
        found = []
        if self._lost() and (lost := self._lost()):  # by what a server had written between two looks, or not
            found.append(lost)
        with self._reading() as connection:
            found += [words for words in self._file_problems(connection) if words not in found]
            found += find_problems(connection, self._blobs, self._packs, after)
        return [*found, *self._snapshot_problems(), *self._shelf_problems()]

    def _snapshot_problems(self) -> list[str]:
        """Of those that are kept at the end too: a server that goes on may have dropped one meanwhile."""
        with self._reading() as connection:
            found = list(snapshot_problems(connection, self._snapshots))
        kept = self._named_snapshots() if found else set()
        return [words for sha256, words in found if sha256 in kept]

    def _lost(self) -> str:
        """Why the log is not whole, empty where it is."""
        try:
            self._check_whole()
        except LogLost as lost:
            return str(lost)
        return ""

    def _named_snapshots(self) -> set[str]:
        with self._reading() as connection:
            return set(connection.scalars(select(snapshots.c.sha256)))

    def _shelf_problems(self) -> list[str]:
        """Which rows that snapshots name are damaged or not there."""
        found: dict[str, str] = {}
        for name in sorted(self._named_rows()):
            try:
                check_row(name, self.shelf.rows.read(name), self.shelf.rows)
            except StoreCorrupt as error:
                found[name] = str(error)
        # A server that goes on may have dropped a snapshot meanwhile, and what that one named.
        return [found[name] for name in sorted(found.keys() & self._named_rows())] if found else []

    def _named_rows(self) -> set[str]:
        named: set[str] = set()
        for sha256 in self._named_snapshots():
            with suppress(StoreCorrupt):  # that is said of the snapshot
                named |= self._snapshots.names(sha256)
        return named

    # --- snapshots ---------------------------------------------------------------------------

    def write_snapshot(self, snapshot: Snapshot) -> str:
        """Make the file of a snapshot durable; returns its SHA-256. From any thread. Raises `StoreFull`."""
        self._check_place()
        self.shelf.flush()  # first: it may name all that lies there
        sha256 = self._snapshots.write(snapshot)
        reach("snapshot_written")
        return sha256

    def save_snapshot(
        self, snapshot: Snapshot, applied_through_seq: int, at: float, keep: Keep = ALL, written: str = ""
    ) -> None:
        """Write a snapshot durably; keeps the newest three, and what `keep` needs. Raises `StoreFull`."""
        self._check_place()
        sha256, version = written or self.write_snapshot(snapshot), snapshot.meta["version"]
        row = {"applied_through_seq": applied_through_seq, "version": version, "sha256": sha256}
        s = snapshots.c
        with self._writing() as connection:
            before = connection.scalar(select(func.min(s.applied_through_seq))) or 0
            upsert(connection, snapshots, [{**row, "created_at": at}])
            write_rows(connection, snapshot, applied_through_seq)
            retained = trimming.retain(connection, keep)
            clear_rows(connection, snapshot, before, retained.seqs[0])
        reach("snapshot_named")
        self._clear_snapshots(retained)
        reach("snapshots_cleared")

    def retain(self, keep: Keep) -> None:
        """Of the snapshots that are there keep what `keep` needs; the log may begin with one of them."""
        self._check_place()
        with self._writing() as connection:
            retained = trimming.retain(connection, keep)
        if retained.seqs:
            self._clear_snapshots(retained)

    def _clear_snapshots(self, retained: trimming.Retained) -> None:
        self._begin = max(self._begin, retained.begin)
        self.shelf.retain(retained.seqs)
        self._snapshots.remove_all_but(retained.sha256s)

    def trim(self, events_max: int) -> int:
        """Drop so many of the events that need not be kept; returns how many were."""
        if not self._begin:
            return 0
        self._check_place()
        bytes_max = 0 if self._archive is None else ARCHIVED_BYTES
        with self._reading() as connection:
            self._dropping.goes_on(first := trimming.first_event(connection), self._begin)
            last = trimming.oldest(connection, self._begin, events_max, bytes_max)
            going = trimming.archived(connection, last) if self._archive is not None else []
        if going and self._archive is not None:
            self._archive.write(going, self.payload)
        with self._writing() as connection:
            piece = trimming.trim(connection, last)
            self._dropped |= piece.payloads
            gone = trimming.unnamed(connection, self._dropped)
            packs = [connection.scalar(select(func.min(of.c.pack))) for of in (updates, mask_sums)]
            first_pack = min((pack for pack in packs if pack is not None), default=None)
        if not piece.events:
            self._begin = 0
            self._dropping.over(first)
        self._dropped = self._blobs.remove(gone)
        self._remove_packs_before(first_pack)
        return piece.events

    def _remove_packs_before(self, first: int | None) -> None:
        """Remove the files of payloads before the first that a row names."""
        newest = self._packs.newest()  # it may be written into
        self._packs.remove_before(newest if first is None else min(first, newest))

    def load(self) -> Recovery:
        """The newest good snapshot and the events after it."""
        return self._recovery(newest_first=True)

    def first(self) -> Recovery:
        """Where the log begins."""
        with self._reading() as connection:
            late = trimming.begins_late(connection)
        return self._recovery(newest_first=False) if late else Recovery(None, 0, self._after(0))

    def _begins_late(self) -> bool:
        with self._reading() as connection:
            return trimming.begins_late(connection)

    def _check_rows(self, snapshot: Snapshot, sha256: str) -> None:
        """Raises `StoreCorrupt` where what a snapshot names is not on the shelf."""
        if missing := self.shelf.missing(named_by(snapshot)):
            name, place = self._snapshots.path(sha256).name, self.shelf.rows.place(min(missing))
            raise StoreCorrupt(f"snapshot {name} names {place}, and {len(missing) - 1} others, not there")

    def _recovery(self, newest_first: bool) -> Recovery:
        with self._reading() as connection:
            seq = snapshots.c.applied_through_seq
            known = connection.execute(select(snapshots).order_by(seq.desc() if newest_first else seq)).all()
            late = trimming.begins_late(connection)
            check_snapshots(connection, log_end(connection), self._database.name)
        # A log that begins late cannot make again what is in a row that all of them share.
        for mends in (False, True) if late else (False,):
            for row in known:
                seq = row.applied_through_seq
                try:
                    snapshot = self._snapshots.read(row.sha256)
                    self._check_rows(snapshot, row.sha256)
                    with self._reading() as connection:
                        snapshot = read_rows(connection, snapshot, seq, mends)
                except StoreCorrupt as error:
                    if row.sha256 not in self._named_snapshots():  # the server has gone on
                        return self._recovery(newest_first)
                    if not mends:
                        log.warning("%s: going %s", error, "back to the one before" if newest_first else "on")
                    continue
                return Recovery(snapshot, seq, self._after(seq), row.created_at, mends)
        if late:
            raise StoreCorrupt(f"{self._database.name}: no snapshot can be read, and the log {BEGINS_LATE}")
        return Recovery(None, 0, self._after(0))
