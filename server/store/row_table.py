"""The rows of a shelf (`support/shelf.py`) in the database itself, for servers that share no disk.

A row waits in this server's memory until the snapshot that may name it is written, or until more than
`HELD_BYTES_MAX` wait, when the oldest ones are: one that its device replaces before that is never written.
Whatever a takeover finds is what its snapshot names, and the log makes the rest again.

Rows are named by their bytes, so that to write one twice is harmless, and one that no snapshot names is of no
use to anybody. They go with the next snapshot that is written. A server that leads no more changes nothing.

Everything is a statement by itself: a successor makes the same rows again, and would wait for the transaction
of a server that was paused within, whose session a takeover does not end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Text,
    and_,
    any_,
    delete,
    literal,
    select,
    text,
    true,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.exc import IntegrityError, ProgrammingError
from sqlalchemy.schema import CreateTable

from anabranch.core.errors import StoreCorrupt, StoreFull
from anabranch.core.limits import MIB
from anabranch.server.failpoints import reach
from anabranch.server.store.postgresql import PostgresqlDatabase
from anabranch.server.store.schema import has_table, shelf_rows
from anabranch.support.shelf import LOST, Pieces

HELD_BYTES_MAX = 64 * MIB
HELD_TIMES_MAX = 2  # so many times as much may wait while others are being written
PIECE_BYTES = 1 * MIB
STATEMENT_BYTES = 4 * MIB  # in one statement, or so much and a row
REMOVED_MAX = 256  # in one statement
_c = shelf_rows.c
# By arrays: whatever their number, one message, and a transaction that ends without another one.
_PUT = text(
    "INSERT INTO shelf_rows (sha256, number, data) "
    "SELECT * FROM unnest(CAST(:names AS text[]), CAST(:numbers AS int[]), CAST(:data AS bytea[])) "
    "WHERE EXISTS (SELECT epoch FROM leader WHERE epoch = :epoch FOR KEY SHARE) "
    "ON CONFLICT (sha256, number) DO UPDATE SET data = excluded.data"
)
RESTORE = (
    "Restore a backup of the database: the log does not begin with its first event (server.keep), so that it "
    "cannot be made again. Leave the row where it is: a server goes on with it until that device comes again"
)


class TableRows:
    """See `RowPlace`. The table comes with the first row: data of a run that has none are as ever."""

    def __init__(
        self,
        database: PostgresqlDatabase,
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
        return (
            f"Delete it from the table {shelf_rows.name}, if it is there, and start again: it is made again "
            "from the log"
        )

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
            over = self._held_bytes / self._held_bytes_max
        try:
            if over > 1:
                self._write_oldest(wait=over > HELD_TIMES_MAX)
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
        waiting = deque(sorted(names))
        while waiting:  # others may have their turn in between
            with self._changing:
                self._write_some(waiting)
        if names:
            reach("shelf_flushed")
        self._clear()
        here = and_(_c.number == 0, _c.sha256 == _any_of(names))  # the last piece of a row that comes there
        return set(names) - self._stored(here) if names else set()

    def remove(self, names: Iterable[str]) -> None:
        """See `RowPlace`: in the database with the next `flush`, as those of a snapshot are many."""
        with self._lock:
            for name in names:
                self._let_go(name)
                self._gone.add(name)

    def names(self) -> set[str]:
        """See `RowPlace`. One of which a crash has left some pieces is among them, to be removed."""
        stored = self._stored(true())
        with self._lock:
            return stored.difference(self._gone).union(self._held)

    def _write_oldest(self, wait: bool) -> None:
        """Write some of what has waited longest; unless somebody else writes, who lessens it as well."""
        if self._changing.acquire(blocking=wait):
            try:
                with self._lock:
                    oldest = deque(self._held)
                self._write_some(oldest)
            finally:
                self._changing.release()

    def _write_some(self, names: deque[str]) -> None:
        """Write so many of these rows, if they are held, as go into one statement, and take them from it."""
        batch, size = dict[str, bytes](), 0
        with self._lock:
            while names and size < STATEMENT_BYTES:
                name = names.popleft()
                if (data := self._held.get(name)) is not None:
                    batch[name], size = data, size + len(data)
        if not batch:
            return
        self._make_table()
        for values in _statements(batch):
            self._database.put(_PUT, values)
            reach("shelf_put")
        with self._lock:
            for name, data in batch.items():
                if self._held.get(name) is data:
                    self._let_go(name)

    def _make_table(self) -> None:
        with self._database.beside() as connection:
            if not self._has_table(connection):
                try:
                    connection.execute(CreateTable(shelf_rows, if_not_exists=True))
                except (IntegrityError, ProgrammingError):  # a leader of before makes it in this very moment
                    if not self._has_table(connection):
                        raise
                self._is_there = True

    def _clear(self) -> None:
        """Remove from the database what is gone."""
        with self._lock:
            going = sorted(self._gone)
        for at in range(0, len(going), REMOVED_MAX):
            with self._changing:
                with self._lock:
                    gone = self._gone.intersection(going[at : at + REMOVED_MAX])
                with self._database.beside() as connection:
                    has_table = self._has_table(connection)
                if has_table and gone:
                    self._database.remove(delete(shelf_rows).where(_c.sha256 == _any_of(gone)))
                with self._lock:
                    self._gone -= gone
        if going:
            reach("shelf_cleared")

    def _stored(self, which: ColumnElement[bool]) -> set[str]:
        with self._database.beside() as connection:
            if not self._has_table(connection):
                return set()
            return set(connection.scalars(select(_c.sha256).where(which)))

    def _has_table(self, connection: Connection) -> bool:
        """Whether this run has one: in a schema further on another run may."""
        if not self._is_there:
            self._is_there = has_table(connection, shelf_rows.name)
        return self._is_there

    def _let_go(self, name: str) -> None:
        """Forget what is held of a row. Inside the lock."""
        self._held_bytes -= len(self._held.pop(name, b""))


def _any_of(names: Iterable[str]) -> ColumnElement[Any]:
    """One value for the database, however many there are."""
    return any_(literal(list(names), ARRAY(Text)))


def _statements(batch: Mapping[str, bytes]) -> Iterator[dict[str, list[Any]]]:
    """The values of statements that write these rows: one, but of a row that is too large for it.

    In the order of the names, since who writes the same rows waits for who was first; and a row from its end
    on, so that one that has its beginning is whole.
    """
    pieces = [
        (name, number, data[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
        for name, data in sorted(batch.items())
        for number in reversed(range(-(-len(data) // PIECE_BYTES)))
    ]
    size, some = 0, list[tuple[str, int, bytes]]()
    for piece in pieces:
        some.append(piece)
        size += len(piece[2])
        if size >= STATEMENT_BYTES:
            yield _columns(some)
            size, some = 0, []
    if some:
        yield _columns(some)


def _columns(pieces: Sequence[tuple[str, int, bytes]]) -> dict[str, list[Any]]:
    return dict(zip(("names", "numbers", "data"), map(list, zip(*pieces, strict=True)), strict=True))
