"""The one writing connection to SQLite or PostgreSQL: how it is opened, what its errors mean.

SQLite has a bug that needs two connections which write or checkpoint (3.7.0 to 3.51.2), so a single
connection does both; readers in other processes open the file read-only.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Delete, Engine, TextClause, create_engine, event
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool, QueuePool

from anabranch.core.config.secrets import masked
from anabranch.core.errors import (
    ConfigError,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreUnreachable,
)
from anabranch.identity.files import tighten
from anabranch.server.store import leader
from anabranch.server.store.base import DiskFailed
from anabranch.server.store.files import open_file, sqlite_address

log = logging.getLogger(__name__)

BEGIN_WRITING = "BEGIN IMMEDIATE"
BUSY_TIMEOUT_MS = 5_000
LOCKED_S_MAX = 60.0  # so long another process's write lock on SQLite is waited for, a backup's perhaps
# A database that is cut off is noticed by these, unless the address says otherwise; a DBA sees whose it is.
POSTGRESQL: dict[str, int | str] = {
    "client_encoding": "utf8",  # else that of the database, or the one that PGCLIENTENCODING says
    "fallback_application_name": "anabranch",  # where neither the address nor PGAPPNAME has one
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
ENCODINGS = ("UTF8", "SQL_ASCII")  # the latter keeps what it is given
# What a role or a database may bound for all its sessions. A server waits and idles: as for `pg_dump`, they
# are off for its own, unless its address says otherwise. Some are of newer releases of PostgreSQL.
UNBOUNDED = (
    "lock_timeout",
    "idle_session_timeout",
    "idle_in_transaction_session_timeout",
    "transaction_timeout",
)
# What a session has in any case, whatever the role, the database or the address says: numbers as they were
# written (a floating-point number comes as text, of which this leaves no digit out), and transactions that
# wait for each other where stricter ones would fail.
OWN = {"extra_float_digits": "3", "default_transaction_isolation": "read committed"}
PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "trusted_schema=OFF",
    "mmap_size=0",
    "journal_size_limit=67108864",
)
LOOK_AGAIN_S = 0.05  # whether there is a connection by now
_FULL = {sqlite3.SQLITE_FULL, "53100"}  # the latter is PostgreSQL's disk_full
_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, "XX001", "XX002"}
_LOCKED = {sqlite3.SQLITE_BUSY, "55P03"}
# Nobody answers, PostgreSQL ends or starts just then, or PgBouncer, by its only code, has no session of it.
_ENDED = {None, "57P01", "57P02", "57P03", "08P01"}
_UNWRITABLE = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}
_COPY = (
    "if its folder cannot be written to, copy that to where it can: of a server that was killed SQLite reads "
    "nothing otherwise"
)
_ANEW = "make it anew from the log beside it (`anabranch admin rebuild`), else restore a backup"


class Database:
    """A connection that is opened late: for reading at the first look, for writing by `open`."""

    def __init__(self, url: URL, lease_s: float = 0.0) -> None:
        self.url, self.lease_s = url, lease_s
        self._epoch: int | None = None
        self._place: tuple[Any, ...] | None = None  # of the writer's session, where every other one is
        self._raw: set[Any] = set()  # PostgreSQL's connections, for `abandon`
        self._abandoned = threading.Event()
        self._engine: Engine | None = None
        self._lasting: Engine | None = None  # of the connections that stay open beside the writer's
        self._renewing: Engine | None = None  # of the one that is the lease's alone
        self._making = threading.Lock()
        self._connection: Connection | None = None
        self._writes = False

    @cached_property
    def name(self) -> str:
        """The address as one writes it, without its password, for messages."""
        written = self.url.set(drivername=self.url.get_backend_name())
        return str(masked(written.render_as_string(hide_password=True)))  # a query may have one too

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file."""
        return self.url.get_backend_name() == "sqlite"

    @cached_property
    def path(self) -> Path:
        """Where the file is, of SQLite."""
        return Path(str(self.url.database))

    def exists(self) -> bool:
        """Whether there is anything to read; what is connected is there.

        An empty file is nothing: SQLite takes it for a new one, and removes the log of its own beside it.
        """
        if self._connection is not None or not self.is_sqlite:
            return True
        return self.path.exists() and self.path.stat().st_size > 0

    def open(self, writes: bool) -> None:
        """Connect; as the writer, lock out every other one.

        Raises `StoreLocked`, `LedByAnother`, `StoreError`.
        """
        self.close()
        self._abandoned.clear()
        self._writes = writes
        # Whoever reads sees one moment, as of SQLite: between two looks a server at work commits.
        level = {} if writes else {"isolation_level": "REPEATABLE READ"}
        self._engine = self._sqlite(writes) if self.is_sqlite else self._postgresql(**level)
        try:
            self._connection = self._engine.connect()
            if writes and not self.is_sqlite:
                self._check_takes(self._connection)
                leader.lock(self._connection)
                with self._connection.begin():
                    self.lead(self._connection)
                self._place = _place_of(self._connection.connection.dbapi_connection)
                self._renewing = self._staying()
                self._renewing.connect().close()  # now: later others may have all that there are
        except DBAPIError as error:
            self.close()
            raise self._meaning(error, "opening") from error
        except BaseException:
            self.close()
            raise

    def _check_takes(self, connection: Connection) -> None:
        """Raises `StoreUnreachable` where PostgreSQL takes nothing: it may yet, as a standby of its does.

        And `ConfigError` where it does not take every text: a server would end at the first such name.
        """
        with connection.begin():
            encoding = connection.exec_driver_sql("SHOW server_encoding").scalar()
            if encoding not in ENCODINGS:
                raise ConfigError(
                    f"{self.name} is of encoding {encoding}, which has not every letter: make one of UTF8 "
                    "(createdb -E UTF8 -T template0 NAME), and move what is there by pg_dump and pg_restore"
                )
            if connection.exec_driver_sql("SHOW transaction_read_only").scalar() == "on":
                raise StoreUnreachable(
                    f"{self.name} only reads: it is a standby that was not promoted, or "
                    "default_transaction_read_only is on"
                )

    def lead(self, connection: Connection) -> None:
        """Begin this server's epoch, once the tables are there; for the writer."""
        if self._epoch is None and not self.is_sqlite:
            owner = f"{socket.gethostname()}:{os.getpid()}"
            self._epoch = leader.claim(connection, owner, self.lease_s)

    def renew(self) -> None:
        """Stay the leader, from any thread. Raises `LeadershipLost`, and `StoreError` if nobody answers."""
        epoch, engine = self._epoch, self._renewing
        if epoch is not None and engine is not None:
            # Not by a connection anew each time: who has none left for that still answers this server. Nor by
            # one that `beside` gives: whoever writes row after row there would leave the lease no moment.
            with self._using(self._opened(engine)) as connection:
                leader.renew(connection, epoch)

    def abandon(self) -> None:
        """Cut every connection to PostgreSQL, from any thread: whoever waits for an answer gets an error."""
        self._abandoned.set()
        for raw in list(self._raw):
            with suppress(Exception), socket.socket(fileno=os.dup(raw.fileno())) as cut:
                cut.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """All or nothing. Raises `StoreFull`, `StoreCorrupt`, and `DiskFailed` if a writer fails."""
        if self._connection is None:
            self.open(writes=False)
        assert self._connection is not None
        if self._writes and self._connection.invalidated:
            # A new connection would not have the lock, and somebody else may have written meanwhile.
            raise DiskFailed(f"the connection to {self.name} was cut: restart to recover")
        with self._meant(), self._connection.begin():
            yield self._connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction of the writer. Raises `LeadershipLost` if another server leads by now."""
        self.check_writes()
        with self.transaction() as connection:
            if self._epoch is not None:
                leader.check(connection, self._epoch)
            yield connection

    def check_writes(self) -> None:
        """Raises `StoreError` where it is open for reading only."""
        if not self._writes:
            raise StoreError(f"the store {self.name} is open for reading only: call start() before writing")

    def look(self, sql: str, values: Sequence[Any]) -> list[Any]:
        """What the writer finds in SQLite, by a statement alone: nothing is begun, nobody is waited for."""
        self.check_writes()
        assert self._connection is not None, "a writer's is opened at once"
        raw: Any = self._connection.connection.dbapi_connection
        try:
            found: list[Any] = raw.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._meaning(DBAPIError(sql, None, error), "using") from error
        return found

    @contextmanager
    def aside(self) -> Iterator[Connection]:
        """A transaction on a connection of its own, from any thread, fenced by nothing. PostgreSQL only."""
        with self._using(self._opened(self._engine or self._postgresql())) as connection:
            yield connection

    @contextmanager
    def beside(self) -> Iterator[Connection]:
        """A connection that stays open, from any thread, fenced by nothing. PostgreSQL only.

        For what every update asks for. Each statement is by itself, so no transaction is left open; before it
        there is a look whether the connection lives. Where others have all that there are, it is waited for
        one that this server has itself: as long as a lease, after which another server may lead.
        """
        latest = time.monotonic() + self.lease_s
        while True:
            try:
                connection = self._opened(self._kept())
            except StoreUnreachable:
                if self._abandoned.wait(LOOK_AGAIN_S) or time.monotonic() >= latest:
                    raise
            else:
                break
        with self._using(connection):
            yield connection

    def _opened(self, engine: Engine) -> Connection:
        """A connection that may be new; where there is none, nothing was written."""
        with self._meant("opening"):
            return engine.connect()

    @contextmanager
    def _using(self, connection: Connection) -> Iterator[Connection]:
        """A transaction of a connection, which is given back."""
        with connection, self._meant(), connection.begin():
            yield connection

    def put(self, statement: TextClause, values: Mapping[str, Any]) -> None:
        """Write rows, from any thread, by a statement that does nothing unless `:epoch` leads.

        Raises `LeadershipLost`. See `remove`.
        """
        self.check_writes()
        assert self._epoch is not None, "who writes leads"
        with self.beside() as connection:
            if not connection.execute(statement, {**values, "epoch": self._epoch}).rowcount:
                leader.check(connection, self._epoch)

    def remove(self, change: Delete) -> None:
        """Remove rows, from any thread; none of them if another server leads by now. PostgreSQL only.

        In one statement that ends by itself: who is paused within a transaction would hold up a takeover.
        """
        self.check_writes()
        assert self._epoch is not None, "who has written leads"
        with self.beside() as connection:
            connection.execute(change.where(leader.leads(self._epoch)))

    def _kept(self) -> Engine:
        with self._making:
            if self._lasting is None:
                self._lasting = self._staying()
            return self._lasting

    def _staying(self) -> Engine:
        # One that idles may be cut, which is no loss: what it was used for last has ended.
        more = {"poolclass": QueuePool, "pool_pre_ping": True, "max_overflow": -1}
        return self._postgresql(**more, isolation_level="AUTOCOMMIT")

    def close(self) -> None:
        """Close the connection. The last one to a SQLite file moves its log into the file."""
        if self._connection is not None:
            self._connection.close()
        for engine in (self._engine, self._lasting, self._renewing):
            if engine is not None:
                engine.dispose()
        self._connection = self._engine = self._lasting = self._renewing = self._epoch = None
        self._place = None
        self._writes = False

    # --- the two kinds -----------------------------------------------------------------------

    def _sqlite(self, writes: bool) -> Engine:
        path = self.path.absolute()
        if writes:
            os.close(open_file(path, os.O_RDWR | os.O_CREAT))  # so that it is its owner's alone
            tighten(path, *(path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm")))

        def connect() -> sqlite3.Connection:
            address = sqlite_address(path, "rw" if writes else "ro")
            timeout_s = BUSY_TIMEOUT_MS / 1000
            raw = sqlite3.connect(
                address, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False
            )
            for pragma in PRAGMAS if writes else ("query_only=ON", "mmap_size=0", "temp_store=MEMORY"):
                raw.execute(f"PRAGMA {pragma}")
            return raw

        def connect_to_read() -> sqlite3.Connection:
            """To the file that has the name by the first look: a smaller one may take its place."""
            while True:
                before, raw = _inode(path), connect()
                with suppress(sqlite3.Error):  # whoever reads next is told
                    raw.execute("PRAGMA schema_version").fetchone()
                if _inode(path) == before:
                    return raw
                raw.close()

        creator = connect if writes else connect_to_read
        engine = create_engine("sqlite://", creator=creator, poolclass=NullPool, hide_parameters=True)
        event.listen(engine, "begin", self._begin_writing if writes else _begin_reading)
        return engine

    def _begin_writing(self, connection: Connection) -> None:
        """Begin with the write lock. Who has it is waited for, but not for ever."""
        raw: Any = connection.connection.dbapi_connection
        latest, told = time.monotonic() + LOCKED_S_MAX, False
        while time.monotonic() < latest:
            try:
                raw.execute(BEGIN_WRITING)
            except sqlite3.Error as error:
                if error.sqlite_errorcode & 0xFF not in _LOCKED:
                    break
            else:
                return
            if not told:
                log.warning("another process has locked %s: waiting, %.0f s at most", self.name, LOCKED_S_MAX)
                told = True
        connection.exec_driver_sql(BEGIN_WRITING)  # whatever it says now is said as an error of the database

    def _postgresql(self, **more: Any) -> Engine:
        arguments = {name: value for name, value in POSTGRESQL.items() if name not in self.url.query}
        options = {"poolclass": NullPool, **more}
        engine = create_engine(self.url, hide_parameters=True, connect_args=arguments, **options)
        event.listen(engine, "connect", lambda raw, _: self._raw.add(raw))
        own = str(self.url.query.get("options", ""))
        event.listen(engine, "connect", lambda raw, _: _settle(raw, own))
        event.listen(engine, "connect", lambda raw, _: self._check_place(raw))
        event.listen(engine, "close", lambda raw, _: self._raw.discard(raw))
        return engine

    def _check_place(self, raw: Any) -> None:
        """Raises `StoreUnreachable` where a new session is not where the writer's is.

        After a failover an address may lead to either of two databases. What one session wrote into the other
        one, the writer's would name in vain.
        """
        if self._place is not None and _place_of(raw) != self._place:
            self._raw.discard(raw)
            raw.close()
            raise StoreUnreachable(
                f"{self.name} leads to another database by now than the one that this server writes to: "
                "another machine answers, or a role's search_path is another. Nothing is written to that one"
            )

    @contextmanager
    def _meant(self, doing: str = "using") -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            raise self._meaning(error, doing) from error

    def _meaning(self, error: DBAPIError, doing: str) -> StoreError:
        code, why = _code(error), f"{doing} {self.name}: {_first_line(error)}"
        if code in _FULL:
            return StoreFull(f"{why}; make room, nothing acknowledged is lost")
        if code in _CORRUPT:
            return StoreCorrupt(f"{why}; {_ANEW if self.is_sqlite else 'restore a backup'}")
        if code in _LOCKED:
            return StoreLocked(f"{why}; another process writes there: stop it, or use another database")
        if code in _UNWRITABLE and not self._writes:
            return StoreError(f"{why}; {_COPY}")
        of_postgresql = isinstance(error, OperationalError) and not self.is_sqlite
        if of_postgresql and code in _ENDED and doing == "opening":
            return StoreUnreachable(f"{self.name} cannot be reached: {_first_line(error)}")
        if self._writes and doing == "using":
            return DiskFailed(f"{why}; what was written is unknown, restart to recover")
        return StoreError(why)


def _inode(path: Path) -> int | None:
    """Which file has this name."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _settle(raw: Any, own: str) -> None:
    """Of a session of PostgreSQL. `own`: the options that its address gives, of which bounds count."""
    if "statement_timeout" not in own:
        raw.execute("SET statement_timeout = 0")  # by itself, first: it may cut the other short
    values = {name: "0" for name in UNBOUNDED if name not in own} | OWN
    change = "SELECT set_config(name, %s::jsonb ->> name, false) FROM pg_settings WHERE name = ANY(%s)"
    raw.execute(change, [json.dumps(values), list(values)])
    raw.commit()


def _place_of(raw: Any) -> tuple[Any, ...]:
    """Where a session of PostgreSQL is: of which process's life, in which database and schema."""
    place = "SELECT date_part('epoch', pg_postmaster_start_time()), current_database(), current_schema()"
    found: tuple[Any, ...] = raw.execute(place).fetchone()
    raw.commit()
    return found


def _begin_reading(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _first_line(error: DBAPIError) -> str:
    """The reason; a driver repeats it for every address that a host has."""
    return str(error.orig).strip().partition("\n")[0]


def _code(error: DBAPIError) -> int | str | None:
    """SQLite's primary result code, or PostgreSQL's SQLSTATE."""
    sqlite_code: int | None = getattr(error.orig, "sqlite_errorcode", None)
    if sqlite_code is not None:
        return sqlite_code & 0xFF
    state: str | None = getattr(error.orig, "sqlstate", None)
    return state
