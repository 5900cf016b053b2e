"""The rows of a shelf (`support/shelf.py`) in the database itself, for servers that share no disk.

A row waits in this server's memory until the snapshot that may name it is written, or until more than
`HELD_BYTES_MAX` wait, when the oldest ones are: one that its device replaces before that is never written.
Whatever a takeover finds is what its snapshot names, and the log makes the rest again.

Rows are named by their bytes, so that to write one twice is harmless, and one that no snapshot names is of no
use to anybody: nothing is fenced but what removes rows. They go with the next snapshot that is written, in
one statement of the leader's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, any_, delete, inspect, literal, select
from sqlalchemy.dialects.postgresql import ARRAY

from anabranch.core.errors import StoreCorrupt, StoreFull
from anabranch.core.limits import MIB
from anabranch.server.failpoints import reach
from anabranch.server.store.database import Database
from anabranch.server.store.projections import upsert
from anabranch.server.store.rows import Row
from anabranch.server.store.schema import shelf_rows
from anabranch.support.shelf import LOST, Pieces

HELD_BYTES_MAX = 64 * MIB
PIECE_BYTES = 1 * MIB
_c = shelf_rows.c
RESTORE = (
    "Restore a backup of the database: the log does not begin with its first event (server.keep), so that it "
    "cannot be made again. Leave the row where it is: a server goes on with it until that device comes again"
)


class TableRows:
    """See `RowPlace`. The table comes with the first row: data of a run that has none are as ever."""

    def __init__(
        self,
        database: Database,
        begins_late: Callable[[], bool] = lambda: False,
        held_bytes_max: int = HELD_BYTES_MAX,
    ) -> None:
        """`begins_late`: whether the log cannot make a row again, as it lacks its first events."""
        self._database, self._begins_late, self._held_bytes_max = database, begins_late, held_bytes_max
        self._lock = threading.Lock()  # of these three
        self._held: dict[str, bytes] = {}  # not in the database, or not as it was put there last
        self._held_bytes = 0
        self._gone: set[str] = set()  # perhaps in the database still
        self._changing = threading.Lock()  # who changes the table has it, and takes the other one inside
        self._is_there = False

    @property
    def remedy(self) -> str:
        """See `RowPlace`."""
        if self._begins_late():
            return RESTORE
        return f"Delete it from the table {shelf_rows.name} and start again: it is made again from the log"

    def place(self, sha256: str) -> str:
        """See `RowPlace`."""
        return f"row {sha256} of the table {shelf_rows.name} in {self._database.name}"

    def write(self, sha256: str, row: Pieces) -> None:
        """See `RowPlace`. Raises what the database does where too much waits."""
        data = b"".join(row)
        with self._lock:
            self._let_go(sha256)
            self._held[sha256] = data
            self._held_bytes += len(data)
            self._gone.discard(sha256)
            oldest = self._oldest() if self._held_bytes > self._held_bytes_max else []
        if oldest:
            try:
                self._write_out(oldest)
            except StoreFull:
                with self._lock:
                    self._let_go(sha256)
                raise
        reach("shelf_written")

    def read(self, sha256: str) -> bytes:
        """See `RowPlace`."""
        with self._lock:
            data = self._held.get(sha256)
        if data is not None:
            return data
        query = select(_c.data).where(_c.sha256 == sha256).order_by(_c.number)
        with self._database.beside() as connection:
            pieces = list(connection.scalars(query)) if self._has_table(connection) else []
        if not pieces:
            raise StoreCorrupt(f"{self.place(sha256)} is not there: {LOST} {self.remedy}")
        return b"".join(pieces)

    def flush(self, names: Collection[str]) -> set[str]:
        """See `RowPlace`. Raises `StoreFull`, and has all of them still. What is gone goes now."""
        self._write_out(names)
        if names:
            reach("shelf_flushed")
        self._clear()
        return set(names) - self._stored(_c.sha256 == _any_of(names)) if names else set()

    def remove(self, names: Iterable[str]) -> None:
        """See `RowPlace`: in the database with the next `flush`, as those of a snapshot are many."""
        with self._lock:
            for name in names:
                self._let_go(name)
                self._gone.add(name)

    def names(self) -> set[str]:
        """See `RowPlace`."""
        stored = self._stored(_c.number == 0)
        with self._lock:
            return stored.difference(self._gone).union(self._held)

    def _oldest(self) -> list[str]:
        """Those that have waited longest, so few that nobody waits long for them. Inside the lock."""
        names, size = list[str](), 0
        for name, data in self._held.items():
            names.append(name)
            size += len(data)
            if size >= self._held_bytes_max // 16:
                break
        return names

    def _write_out(self, names: Iterable[str]) -> None:
        """Write those of these rows that are held into the database, in one transaction."""
        with self._changing:
            with self._lock:
                batch = {name: self._held[name] for name in sorted(names) if name in self._held}
            if not batch:
                return
            with self._database.beside(together=True) as connection:
                if not self._has_table(connection):
                    shelf_rows.create(connection)
                for name, data in batch.items():
                    upsert(connection, shelf_rows, _pieces(name, data))
            self._is_there = True
            with self._lock:
                for name, data in batch.items():
                    if self._held.get(name) is data:
                        self._let_go(name)

    def _clear(self) -> None:
        """Remove from the database what is gone."""
        with self._changing:
            with self._lock:
                gone = set(self._gone)
            if not gone:
                return
            with self._database.beside() as connection:
                has_table = self._has_table(connection)
            if has_table:
                self._database.remove(delete(shelf_rows).where(_c.sha256 == _any_of(gone)))
            with self._lock:
                self._gone -= gone
        reach("shelf_cleared")

    def _stored(self, which: ColumnElement[bool]) -> set[str]:
        with self._database.beside() as connection:
            if not self._has_table(connection):
                return set()
            return set(connection.scalars(select(_c.sha256).where(which)))

    def _has_table(self, connection: Connection) -> bool:
        self._is_there = self._is_there or inspect(connection).has_table(shelf_rows.name)
        return self._is_there

    def _let_go(self, name: str) -> None:
        """Forget what is held of a row. Inside the lock."""
        self._held_bytes -= len(self._held.pop(name, b""))


def _any_of(names: Iterable[str]) -> ColumnElement[Any]:
    """One value for the database, however many there are."""
    return any_(literal(list(names), ARRAY(Text)))


def _pieces(name: str, data: bytes) -> list[Row]:
    places = range(0, len(data), PIECE_BYTES)
    return [
        {"sha256": name, "number": number, "data": data[at : at + PIECE_BYTES]}
        for number, at in enumerate(places)
    ]
