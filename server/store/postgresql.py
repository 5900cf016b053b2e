"""PostgreSQL: the writer's session, those beside it, and that one server at a time writes (`leader.py`)."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import URL, Connection, Delete, Engine, TextClause, create_engine, event
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool, QueuePool

from anabranch.core.errors import ConfigError, StoreError, StoreUnreachable
from anabranch.server.store import leader
from anabranch.server.store.database import Database, code_of, first_line

# A database that is cut off is noticed by these, unless the address says otherwise; a DBA sees whose it is.
DEFAULTS: dict[str, int | str] = {
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
LOOK_AGAIN_S = 0.05  # whether there is a connection by now
# Nobody answers, PostgreSQL ends or starts just then, or PgBouncer, by its only code, has no session of it.
_ENDED = {None, "57P01", "57P02", "57P03", "08P01"}


class PostgresqlDatabase(Database):
    """A database of which the writer is the leader, for as long as it renews its lease of `lease_s`."""

    remedy = "restore a backup"

    def __init__(self, url: URL, lease_s: float = 0.0) -> None:
        super().__init__(url)
        self.lease_s = lease_s
        self._epoch: int | None = None
        self._place: tuple[Any, ...] | None = None  # of the writer's session, where every other one is
        self._raw: set[Any] = set()  # all connections, for `abandon`
        self._abandoned = threading.Event()
        self._lasting: Engine | None = None  # of the connections that stay open beside the writer's
        self._renewing: Engine | None = None  # of the one that is the lease's alone
        self._making = threading.Lock()

    def open(self, writes: bool) -> None:
        """See `Database`. Raises `StoreUnreachable` where nobody answers, or it only reads.

        And, of who comes to write, `LedByAnother`, and `ConfigError` where it does not take every text.
        """
        self._abandoned.clear()
        super().open(writes)

    def lead(self, connection: Connection) -> None:
        """Begin this server's epoch, once the tables are there; for the writer."""
        if self._epoch is None:
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
        """Cut every connection, from any thread: whoever waits for an answer gets an error."""
        self._abandoned.set()
        for raw in list(self._raw):
            with suppress(Exception), socket.socket(fileno=os.dup(raw.fileno())) as cut:
                cut.shutdown(socket.SHUT_RDWR)

    def _lock_out_others(self, connection: Connection) -> None:
        self._check_takes(connection)
        leader.lock(connection)
        with connection.begin():
            self.lead(connection)
        self._place = _place_of(connection.connection.dbapi_connection)
        self._renewing = self._staying()
        self._renewing.connect().close()  # now: later others may have all that there are

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

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """See `Database`. Raises `LeadershipLost` if another server leads by now."""
        with super().writing() as connection:
            if self._epoch is not None:
                leader.check(connection, self._epoch)
            yield connection

    @contextmanager
    def aside(self) -> Iterator[Connection]:
        """A transaction on a connection of its own, from any thread, fenced by nothing."""
        with self._using(self._opened(self._engine or self._new_engine())) as connection:
            yield connection

    @contextmanager
    def beside(self) -> Iterator[Connection]:
        """A connection that stays open, from any thread, fenced by nothing.

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
        """Remove rows, from any thread; none of them if another server leads by now.

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
        return self._new_engine(**more, isolation_level="AUTOCOMMIT")

    def close(self) -> None:
        """Close all connections."""
        super().close()
        for engine in (self._lasting, self._renewing):
            if engine is not None:
                engine.dispose()
        self._lasting = self._renewing = self._epoch = self._place = None

    def _engine_for(self, writes: bool) -> Engine:
        # Whoever reads sees one moment, as of SQLite: between two looks a server at work commits.
        return self._new_engine() if writes else self._new_engine(isolation_level="REPEATABLE READ")

    def _new_engine(self, **more: Any) -> Engine:
        arguments = {name: value for name, value in DEFAULTS.items() if name not in self.url.query}
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

    def _meaning(self, error: DBAPIError, doing: str) -> StoreError:
        if doing == "opening" and isinstance(error, OperationalError) and code_of(error) in _ENDED:
            return StoreUnreachable(f"{self.name} cannot be reached: {first_line(error)}")
        return super()._meaning(error, doing)


def _settle(raw: Any, own: str) -> None:
    """Of a session. `own`: the options that its address gives, of which bounds count."""
    if "statement_timeout" not in own:
        raw.execute("SET statement_timeout = 0")  # by itself, first: it may cut the other short
    values = {name: "0" for name in UNBOUNDED if name not in own} | OWN
    change = "SELECT set_config(name, %s::jsonb ->> name, false) FROM pg_settings WHERE name = ANY(%s)"
    raw.execute(change, [json.dumps(values), list(values)])
    raw.commit()


def _place_of(raw: Any) -> tuple[Any, ...]:
    """Where a session is: of which process's life, in which database and schema."""
    place = "SELECT date_part('epoch', pg_postmaster_start_time()), current_database(), current_schema()"
    found: tuple[Any, ...] = raw.execute(place).fetchone()
    raw.commit()
    return found
