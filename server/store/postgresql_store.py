"""The store on PostgreSQL, which has all: servers may share it, and no disk.

The rows are the log. What makes an append cheap is that a whole batch is one transaction, whatever the number
of events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from sqlalchemy import URL, Connection, bindparam, select

from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.server.store import revision, rows
from anabranch.server.store.base import Entry, Mark, Projection, RunInfo
from anabranch.server.store.chunks import ChunkedBlobs, ChunkedSnapshots, has_payload
from anabranch.server.store.ending import (
    ATTEST_DATABASE,
    check_begins,
    check_end,
    check_own,
    check_snapshots,
    log_end,
)
from anabranch.server.store.following import write_events
from anabranch.server.store.numbering import numbered
from anabranch.server.store.postgresql import PostgresqlDatabase
from anabranch.server.store.row_table import TableRows
from anabranch.server.store.schema import updates
from anabranch.server.store.sql import SqlStore
from anabranch.server.store.statements import Statement
from anabranch.support.shelf import RowShelf


class PostgresqlStore(SqlStore):
    """See `SqlStore`. `lease_s`: see `Store.lease_s`."""

    _database: PostgresqlDatabase

    def __init__(
        self,
        url: URL,
        data_dir: Path,
        limits: Limits = DEFAULT_LIMITS,
        lease_s: float = 10.0,
        archive: Path | None = None,
        disk_bytes_max: int = 0,
    ) -> None:
        super().__init__(data_dir, limits, archive, disk_bytes_max)
        self._database = base = PostgresqlDatabase(url, lease_s)
        self._blobs = ChunkedBlobs(base, data_dir, limits)
        self._snapshots = ChunkedSnapshots(base, data_dir, limits)
        self.shelf = RowShelf(TableRows(base, self._begins_late))

    # --- the run -----------------------------------------------------------------------------

    @property
    def lease_s(self) -> float:
        """After how long without `renew` another server may take over."""
        return self._database.lease_s

    def renew(self) -> None:
        """Stay the leader for another `lease_s`. From any thread. Raises `LeadershipLost`, `StoreError`."""
        self._database.renew()

    def abandon(self) -> None:
        """From any thread: let go of the database; whoever waits for it gets an error."""
        self._database.abandon()

    def _enter(self, connection: Connection, info: RunInfo) -> RunInfo:
        self._database.lead(connection)
        stored = super()._enter(connection, info)
        check_own(self._data_dir, stored.run_id)
        if stored is info:  # the database had none
            check_begins(self._data_dir, self._database.name)
        return stored

    # --- the log -----------------------------------------------------------------------------

    def _begin_log(self, stored: RunInfo) -> None:
        self._check_whole()

    def append(self, entries: Sequence[Entry], projections: Sequence[Projection] = ()) -> list[int | None]:
        """See `Store`."""
        self._database.check_writes()
        if not (entries or projections):  # nothing to write, and a look goes on
            return []
        self._check_room(entries)
        with self._committing() as connection:
            seqs = numbered(partial(_stored_ids, connection), entries, self._last_seq)
            new = [(seq, e) for seq, e in zip(seqs, entries, strict=True) if seq is not None]
            self._check_blobs([entry for _, entry in new], partial(has_payload, connection))
            if named_anew := self._are_named_anew(new):
                revision.admit_blake3(connection)
            write_events(connection, [rows.rows_of(*each) for each in new], projections)
        self._has_blake3 |= named_anew
        self._last_seq += len(new)
        return seqs

    def mark(self) -> Mark | None:
        """What `acknowledge` was told last; None where that was of another database than this one."""
        found = super().mark()
        if found is None:
            return None
        info = self.info()
        return found if info is not None and info.run_id == found.run_id else None

    def _see_all(self) -> None:
        """Rows are the log."""

    def _end_log(self, run_id: str, end: int) -> None:
        """It ends with the last row."""

    # --- what is lost ------------------------------------------------------------------------

    def _check_log(self, mark: Mark | None) -> None:
        name = self._database.name
        with self._reading() as connection:
            end = log_end(connection)
            check_end(mark, end, name, ATTEST_DATABASE)
            check_snapshots(connection, end, name)

    def _snapshots_ahead(self, connection: Connection) -> list[str]:
        """None: one that no row names is in the same database, which has the version as well."""
        return []

    def _file_problems(self, connection: Connection) -> Iterator[str]:
        """None: it looks after its files itself."""
        return iter(())

    def _tell_missing(self, blobs: set[str], packs: set[int]) -> None:
        """Payloads are in the database, which was lost as a whole or not at all."""


def _stored_ids(connection: Connection, ids: list[str]) -> set[str]:
    """Which of these updates have a row."""
    row = {f"id_{n}": update_id for n, update_id in enumerate(ids)}
    return set(_logged(len(ids)).one(connection, row).scalars())


@cache  # a batch has a bounded number of events
def _logged(count: int) -> Statement:
    """Which of so many ids are of updates in the log."""
    ids = [bindparam(f"id_{n}", type_=updates.c.update_id.type) for n in range(count)]
    return Statement(select(updates.c.update_id).where(updates.c.update_id.in_(ids)))
