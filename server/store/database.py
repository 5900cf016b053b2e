"""The one writing connection to a database: what a transaction of it is, and what its errors mean.

How SQLite's is opened is in `sqlite.py`, and PostgreSQL's, which has others beside it, in `postgresql.py`.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import ClassVar

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError

from anabranch.core.config.secrets import masked
from anabranch.core.errors import StoreCorrupt, StoreError, StoreFull, StoreLocked
from anabranch.server.store.base import DiskFailed

# Of SQLite, whose codes are numbers, and of PostgreSQL, whose codes are texts.
_FULL = {sqlite3.SQLITE_FULL, "53100"}
_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, "XX001", "XX002"}
_LOCKED = {sqlite3.SQLITE_BUSY, "55P03"}


class Database(ABC):
    """A connection that is opened late: for reading at the first look, for writing by `open`."""

    remedy: ClassVar[str]  # of one that is damaged

    def __init__(self, url: URL) -> None:
        self.url = url
        self._engine: Engine | None = None
        self._connection: Connection | None = None
        self._writes = False

    @cached_property
    def name(self) -> str:
        """The address as one writes it, without its password, for messages."""
        written = self.url.set(drivername=self.url.get_backend_name())
        return str(masked(written.render_as_string(hide_password=True)))  # a query may have one too

    @property
    def writes(self) -> bool:
        """Whether it is open for writing."""
        return self._writes

    def exists(self) -> bool:
        """Whether there is anything to read; what is connected is there."""
        return True

    def open(self, writes: bool) -> None:
        """Connect; as the writer, lock out every other one. Raises `StoreLocked`, `StoreError`."""
        self.close()
        self._writes = writes
        self._engine = self._engine_for(writes)
        try:
            self._connection = self._engine.connect()
            if writes:
                self._lock_out_others(self._connection)
        except DBAPIError as error:
            self.close()
            raise self._meaning(error, "opening") from error
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _engine_for(self, writes: bool) -> Engine:
        """What connects, to write or to read."""

    @abstractmethod
    def _lock_out_others(self, connection: Connection) -> None:
        """Be the only writer, for as long as the connection lasts."""

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
        """A transaction of the writer."""
        self.check_writes()
        with self.transaction() as connection:
            yield connection

    def check_writes(self) -> None:
        """Raises `StoreError` where it is open for reading only."""
        if not self._writes:
            raise StoreError(f"the store {self.name} is open for reading only: call start() before writing")

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        if self._engine is not None:
            self._engine.dispose()
        self._connection = self._engine = None
        self._writes = False

    @contextmanager
    def _meant(self, doing: str = "using") -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            raise self._meaning(error, doing) from error

    def _meaning(self, error: DBAPIError, doing: str) -> StoreError:
        code, why = code_of(error), f"{doing} {self.name}: {first_line(error)}"
        if code in _FULL:
            return StoreFull(f"{why}; make room, nothing acknowledged is lost")
        if code in _CORRUPT:
            return StoreCorrupt(f"{why}; {self.remedy}")
        if code in _LOCKED:
            return StoreLocked(f"{why}; another process writes there: stop it, or use another database")
        if self._writes and doing == "using":
            return DiskFailed(f"{why}; what was written is unknown, restart to recover")
        return StoreError(why)


def first_line(error: DBAPIError) -> str:
    """The reason; a driver repeats it for every address that a host has."""
    return str(error.orig).strip().partition("\n")[0]


def code_of(error: DBAPIError) -> int | str | None:
    """SQLite's primary result code, or PostgreSQL's SQLSTATE."""
    sqlite_code: int | None = getattr(error.orig, "sqlite_errorcode", None)
    if sqlite_code is not None:
        return sqlite_code & 0xFF
    state: str | None = getattr(error.orig, "sqlstate", None)
    return state
