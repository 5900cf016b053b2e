"""The store on SQLite, with the log and all large files beside it.

What makes an append cheap is that a whole batch is one write into the log (`segments.py`) and one flush,
whatever the number of events. The rows follow it (`following.py`), and whoever reads meanwhile lays what they
lack over them (`overlay.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, func, select, text

from anabranch.core.errors import LogLost, StoreError, StoreFull
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.server.store import revision, rows
from anabranch.server.store.base import Entry, Mark, Projection, RunInfo
from anabranch.server.store.blobs import BlobStore
from anabranch.server.store.ending import (
    ATTEST,
    check_alone,
    check_end,
    check_files,
    check_rows,
    check_snapshots,
    files_ahead,
    log_end,
    rows_end,
)
from anabranch.server.store.following import Following, in_pieces, write_events
from anabranch.server.store.numbering import numbered
from anabranch.server.store.overlay import Overlay
from anabranch.server.store.run_note import note_run
from anabranch.server.store.schema import mask_sums, runs, updates
from anabranch.server.store.segments import Segments
from anabranch.server.store.shelf import StoredRows
from anabranch.server.store.shrinking import shrink
from anabranch.server.store.snapshots import SnapshotFiles
from anabranch.server.store.sql import SqlStore
from anabranch.server.store.sqlite import SqliteDatabase
from anabranch.support.shelf import RowShelf

log = logging.getLogger(__name__)


class SqliteStore(SqlStore):
    """See `SqlStore`. `path`: of SQLite's file; all others are in `data_dir`, and its lock is of both."""

    _database: SqliteDatabase

    def __init__(
        self,
        path: Path,
        data_dir: Path,
        limits: Limits = DEFAULT_LIMITS,
        archive: Path | None = None,
        disk_bytes_max: int = 0,
    ) -> None:
        super().__init__(data_dir, limits, archive, disk_bytes_max)
        self._database = SqliteDatabase(path)
        self._blobs, self._snapshots = BlobStore(data_dir, limits), SnapshotFiles(data_dir, limits)
        self.shelf = RowShelf(StoredRows(data_dir, limits.free_disk_bytes_min, self._begins_late))
        self._segments = Segments(data_dir, held_bytes_max=disk_bytes_max)
        self._following = Following()
        self._overlay = Overlay(self._segments)
        self._told_flaw = ""

    # --- the run -----------------------------------------------------------------------------

    @property
    def lease_s(self) -> float:
        """No other server can take over."""
        return 0.0

    def renew(self) -> None:
        """Nothing: see `lease_s`."""

    def abandon(self) -> None:
        """Nothing: a file does not keep anybody waiting for ever."""

    def info(self) -> RunInfo | None:
        """See `Store`. Raises `LogLost` where files of one lie there that SQLite's file does not know."""
        found = super().info()
        if found is None:
            check_alone(self._segments, self._marks, self._database.path)
        return found

    def close(self) -> None:
        """Write what the rows lack, as a courtesy to who reads them: the log has it. Then let go of all."""
        with ExitStack() as rest:
            rest.callback(super().close)
            rest.callback(self._segments.close)
            rest.callback(self._overlay.forget)
            with suppress(StoreError):
                self._complete()

    def _open_to_write(self) -> None:
        self._check_whole()  # a writer drops what it cannot read of SQLite's own log
        self._database.close()
        shrink(self._database.path, self._limits.free_disk_bytes_min)
        super()._open_to_write()
        self._following = Following()

    # --- the log -----------------------------------------------------------------------------

    def _begin_log(self, stored: RunInfo) -> None:
        note_run(self._data_dir, stored)
        self._segments.prepare(stored.run_id, self._newest_number())
        self._take_up(stored.run_id)

    def _newest_number(self) -> int:
        """The highest number of a segment or pack; of one as well that rows name and somebody has removed."""
        if self._segments.state():
            return self._packs.newest()
        with self._database.writing() as connection:
            named = [connection.scalar(select(func.max(of.c.pack))) or 0 for of in (updates, mask_sums)]
        return max(self._packs.newest(), *named)

    def _take_up(self, run_id: str) -> None:
        """Write the rows of what a server before this one had in its log. Raises `LogLost`, `StoreFull`."""
        with self._database.writing() as connection:
            end = log_end(connection)
            revision.admit_named(connection)
        segments = self._segments.needed(run_id, end)
        self._segments.make_durable(segments)  # rows are, and may not name what is not
        for piece in in_pieces(self._segments.events(segments, end)):
            with self._committing() as connection:
                write_events(connection, piece, ())
                revision.admit_named(connection)
            self._last_seq = piece[-1].seq

    def append(self, entries: Sequence[Entry], projections: Sequence[Projection] = ()) -> list[int | None]:
        """See `Store`. Rows follow the log later, all of them at the latest with a call without entries."""
        self._database.check_writes()
        if not (entries or projections or self._following):  # nothing to write, and a look goes on
            return []
        self._check_room(entries)
        if not entries:
            self._complete(projections)
            return []
        known = partial(_stored_ids, self._database)
        seqs = numbered(known, entries, self._last_seq, self._following.update_ids)
        new = [(seq, e) for seq, e in zip(seqs, entries, strict=True) if seq is not None]
        logged = [rows.checked_rows(*each) for each in new]
        if new:
            self._check_blobs([entry for _, entry in new], self._blobs.exists)
            if self._are_named_anew(new):
                with self._database.writing() as connection:  # durable before the log has it
                    revision.admit_blake3(connection)
                self._has_blake3 = True
            lines = [(entry.line, entry.inline) for _, entry in new]
            for its, place in zip(logged, self._segments.append(self._last_seq + 1, lines), strict=True):
                its.lie_at(place)
        self._last_seq += len(new)
        self._following.add(logged, projections)
        if self._following.is_due:
            try:
                self._complete()
            except StoreFull as full:  # the log has them: they are written when there is room
                log.warning("the rows of events that are in the log wait: %s", full)
        return seqs

    def _complete(self, projections: Sequence[Projection] = ()) -> None:
        """Write the rows of all that is in the log, and projections. Raises `StoreFull`: no event is lost."""
        if self._following or projections:
            with self._committing() as connection:
                self._following.write(connection, projections)
            self._following.clear()
            self._marks.settle()

    def _write_mark(self, mark: Mark) -> None:
        self._marks.write(mark, flushed=False)  # the rows' commit flushes it, and each second one does

    def _see_all(self) -> None:
        """The writer writes what the rows lack of the log, whoever else reads lays it over them."""
        if self._database.writes:
            self._complete()
            return
        flawed_at = None
        while True:
            with self._database.transaction() as connection:
                if revision.has_tables(connection) and (run_id := connection.scalar(select(runs.c.run_id))):
                    self._overlay.lay(connection, run_id)
            if self._overlay.flaw is None:
                return
            if self._overlay.rows_end == flawed_at:
                self._tell_flaw(self._overlay.flaw)
                return
            # Perhaps the server has written the rows, and removed the segment: then there are more rows now.
            flawed_at = self._overlay.rows_end
            self._overlay.look_again()

    def _tell_flaw(self, flaw: LogLost) -> None:
        """Once: whoever reads gets what is whole before it."""
        if str(flaw) != self._told_flaw:
            self._told_flaw = str(flaw)
            log.warning("%s", flaw)

    def _end_log(self, run_id: str, end: int) -> None:
        if self._overlay.flaw is not None:
            self._segments.go_on_from(run_id, end)

    # --- what is lost ------------------------------------------------------------------------

    def _check_log(self, mark: Mark | None) -> None:
        name, there = self._database.name, set(self._snapshots.others(set()))
        with self._reading() as connection:
            check_end(mark, log_end(connection), name, ATTEST)
            end = rows_end(connection)  # they come before a snapshot of what is in them
            check_rows(connection, end, name)
            check_snapshots(connection, end, name)
            if self._overlay.flaw is not None:
                raise self._overlay.flaw
            # Of what is in the log alone nothing is published in the rows: that is for `acknowledge` to tell.
            if not self._overlay.size:
                check_files(connection, self._snapshots, name, there)

    def _snapshots_ahead(self, connection: Connection) -> list[str]:
        return files_ahead(connection, self._snapshots)

    def unproved_snapshots(self) -> dict[Path, int]:
        """The files of snapshots of versions that no row has, and these: a replay of the log comes to them.

        None where all of the log has rows: `problems` has looked.
        """
        with self._reading() as connection:
            if not self._overlay.size:
                return {}
            ahead = self._snapshots_ahead(connection)
        return {self._snapshots.path(sha256): self._snapshots.version_of(sha256) or 0 for sha256 in ahead}

    def _file_problems(self, connection: Connection) -> Iterator[str]:
        if self._overlay.flaw is not None:
            yield str(self._overlay.flaw)
        for (found,) in connection.execute(text("PRAGMA integrity_check(20)")):
            if found != "ok":
                yield f"the database file is damaged: {found}"

    def _tell_missing(self, blobs: set[str], packs: set[int]) -> None:
        """A run goes on from a snapshot without its payloads: what is lost is to be heard of now."""
        if missing := [*self._packs.missing(packs), *self._blobs.missing(blobs)]:
            others = f", nor are {len(missing) - 1} others that rows name" if len(missing) > 1 else ""
            log.warning(
                "%s is not there%s: the run goes on, but payloads of its log are lost to rollbacks, reports "
                "and replays (`anabranch verify` says which): put it back, or restore a backup",
                *(missing[0], others),
            )

    def _remove_packs_before(self, first: int | None) -> None:
        if first is None or first >= self._packs.newest():
            self._segments.end_soon()
        super()._remove_packs_before(first)


def _stored_ids(database: SqliteDatabase, ids: list[str]) -> set[str]:
    """Which of these updates have a row, without a transaction: every batch asks, and few have any there."""
    places = ", ".join("?" * len(ids))
    query = f"SELECT update_id FROM updates WHERE update_id IN ({places})"  # noqa: S608 - no values
    return {update_id for (update_id,) in database.look(query, ids)}
