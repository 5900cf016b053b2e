"""SQLite's file: how it is opened, and who may write to it.

SQLite has a bug that needs two connections which write or checkpoint (3.7.0 to 3.51.2), so a single
connection does both; readers in other processes open the file read-only.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from anabranch.core.errors import StoreError
from anabranch.identity.files import tighten
from anabranch.server.store.database import Database, code_of
from anabranch.server.store.files import open_file, sqlite_address

log = logging.getLogger(__name__)

BEGIN_WRITING = "BEGIN IMMEDIATE"
BUSY_TIMEOUT_MS = 5_000
LOCKED_S_MAX = 60.0  # so long another process's write lock on SQLite is waited for, a backup's perhaps
PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "trusted_schema=OFF",
    "mmap_size=0",
    "journal_size_limit=67108864",
)
_UNWRITABLE = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}
_COPY = (
    "if its folder cannot be written to, copy that to where it can: of a server that was killed SQLite reads "
    "nothing otherwise"
)


class SqliteDatabase(Database):
    """The file at `path`. Whoever closes the last connection to it moves SQLite's own log into it."""

    remedy = "make it anew from the log beside it (`anabranch admin rebuild`), else restore a backup"

    def __init__(self, path: Path) -> None:
        super().__init__(URL.create("sqlite", database=str(path)))
        self.path = path

    def exists(self) -> bool:
        """Whether there is anything to read; what is connected is there.

        An empty file is nothing: SQLite takes it for a new one, and removes the log of its own beside it.
        """
        if self._connection is not None:
            return True
        return self.path.exists() and self.path.stat().st_size > 0

    def look(self, sql: str, values: Sequence[Any]) -> list[Any]:
        """What the writer finds, by a statement alone: nothing is begun, nobody is waited for."""
        self.check_writes()
        assert self._connection is not None, "a writer's is opened at once"
        raw: Any = self._connection.connection.dbapi_connection
        try:
            found: list[Any] = raw.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._meaning(DBAPIError(sql, None, error), "using") from error
        return found

    def _engine_for(self, writes: bool) -> Engine:
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

    def _lock_out_others(self, connection: Connection) -> None:
        """Nothing: each transaction begins with the lock."""

    def _begin_writing(self, connection: Connection) -> None:
        """Begin with the write lock. Who has it is waited for, but not for ever."""
        raw: Any = connection.connection.dbapi_connection
        latest, told = time.monotonic() + LOCKED_S_MAX, False
        while time.monotonic() < latest:
            try:
                raw.execute(BEGIN_WRITING)
            except sqlite3.Error as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    break
            else:
                return
            if not told:
                log.warning("another process has locked %s: waiting, %.0f s at most", self.name, LOCKED_S_MAX)
                told = True
        connection.exec_driver_sql(BEGIN_WRITING)  # whatever it says now is said as an error of the database

    def _meaning(self, error: DBAPIError, doing: str) -> StoreError:
        found = super()._meaning(error, doing)
        if code_of(error) in _UNWRITABLE and not self._writes:
            return StoreError(f"{found}; {_COPY}")
        return found


def _inode(path: Path) -> int | None:
    """Which file has this name."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _begin_reading(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")
