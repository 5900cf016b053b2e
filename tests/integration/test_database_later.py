"""A server on PostgreSQL whose database comes later, or lets nobody in."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

import grpc
import psycopg
import pytest
from postgres_gate import SOCKET
from sqlalchemy import Connection, make_url, text
from wire import server_config

from anabranch.core.errors import ConfigError, StoreNewer, StoreUnreachable
from anabranch.server import standby
from anabranch.server.app import ServerInfo, serve
from anabranch.server.manifest import Manifest
from anabranch.server.recovery import Recovered
from anabranch.server.standby import StandbyPorts, await_turn
from anabranch.server.store import leader
from anabranch.server.store.base import LedByAnother
from anabranch.server.store.postgresql import PostgresqlDatabase


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the database's socket will be: a path of 107 bytes at most."""
    made = Path(tempfile.mkdtemp(prefix="anabranch-later-"))
    yield made
    shutil.rmtree(made)


def test_a_database_that_comes_later_is_waited_for(
    tmp_path: Path, folder: Path, manifest: Manifest, postgresql_url: str
) -> None:
    parts = urlsplit(postgresql_url)
    (host,) = parse_qs(parts.query)["host"]
    url = urlunsplit(parts._replace(query=f"host={folder}"))
    said: list[str] = []
    served: list[ServerInfo] = []
    stop = asyncio.Event()

    def waiting(why: str) -> None:
        said.append(why)
        (folder / SOCKET).symlink_to(f"{host}/{SOCKET}")  # now it is there

    def ready(info: ServerInfo) -> None:
        served.append(info)
        stop.set()

    config = server_config(tmp_path / "data", server={"database": url})
    assert asyncio.run(serve(config, manifest, ready=ready, waiting=waiting, stop=stop)) == 0
    assert len(served) == 1
    (why,) = said
    assert why.startswith("waiting for the database: postgresql://")
    assert "cannot be reached" in why


def test_who_asks_meanwhile_is_told_of_the_database_and_not_of_another_server(
    tmp_path: Path, folder: Path, manifest: Manifest
) -> None:
    """And not where it is: that is for the log."""
    told: list[str] = []
    stop = asyncio.Event()
    database = f"postgresql://postgres:word@/there-is-none?host={folder}"

    async def ask(address: str) -> None:
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                call: Any = channel.unary_unary("/anabranch.v1.Any/Call")
                await call(b"", wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            told.append(error.details() or "")
        finally:
            stop.set()

    async def served() -> None:
        config = server_config(tmp_path / "data", server={"database": database})
        asked: list[asyncio.Task[None]] = []
        ports = StandbyPorts(config, config.limits, None)

        def waiting(why: str) -> None:
            assert str(folder) in why
            asked.append(asyncio.create_task(ask(ports.address)))

        def begin(_: float | None) -> Recovered:
            url = make_url(database).set(drivername="postgresql+psycopg")
            with closing(PostgresqlDatabase(url)) as store:
                store.open(writes=True)
            raise AssertionError("there is no database")

        assert await await_turn(begin, config, ports, stop, waiting) is None
        await asyncio.gather(*asked)

    asyncio.run(served())
    assert told == ["this server waits for its database, and its log says why: try again later"]


def test_a_database_that_only_reads_is_waited_for(
    tmp_path: Path, manifest: Manifest, postgresql_url: str
) -> None:
    """As a copy of it does until it is promoted: whoever serves then need not be started again."""
    name = urlsplit(postgresql_url).path[1:]

    def takes(writes: bool) -> None:
        with psycopg.connect(postgresql_url, autocommit=True) as admin:
            admin.execute("SET default_transaction_read_only = off")
            only_reads = "off" if writes else "on"
            admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {only_reads}".encode())

    said: list[str] = []
    served: list[ServerInfo] = []
    stop = asyncio.Event()

    def waiting(why: str) -> None:
        said.append(why)
        takes(writes=True)

    def ready(info: ServerInfo) -> None:
        served.append(info)
        stop.set()

    takes(writes=False)
    config = server_config(tmp_path / "data", server={"database": postgresql_url})
    assert asyncio.run(serve(config, manifest, ready=ready, waiting=waiting, stop=stop)) == 0
    assert len(served) == 1
    (why,) = said
    assert "only reads: it is a standby that was not promoted" in why


def test_one_that_lets_nobody_in_is_not_waited_for(
    tmp_path: Path, manifest: Manifest, postgresql_url: str
) -> None:
    url = urlunsplit(urlsplit(postgresql_url)._replace(path="/there-is-none"))
    config = server_config(tmp_path / "data", server={"database": url})
    with pytest.raises(StoreUnreachable, match="does not exist"):
        asyncio.run(serve(config, manifest, waiting=pytest.fail))


def test_a_database_that_is_started_anew_while_a_standby_looks_is_waited_for(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL ends every connection, that of the standby among them, in its wait for the lock."""
    url = make_url(postgresql_url).set(drivername="postgresql+psycopg")
    standing_by = PostgresqlDatabase(url, 600.0)

    def ended(connection: Connection) -> None:
        backend = connection.scalar(text("SELECT pg_backend_pid()"))
        with psycopg.connect(postgresql_url, autocommit=True) as admin:
            admin.execute("SELECT pg_terminate_backend(%s, 60000)", (backend,))
        connection.execute(text("SELECT 1"))

    monkeypatch.setattr(leader, "lock", ended)
    with pytest.raises(StoreUnreachable, match="cannot be reached: terminating connection") as found:
        standing_by.open(writes=True)
    assert standby._may_pass(found.value, standby=True)


@pytest.mark.parametrize("said", ["server login has been failing, try again later", "server conn crashed?"])
def test_a_pooler_that_gets_no_session_just_then_is_waited_for(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """PgBouncer lets one in while PostgreSQL is away, and tells at the first statement, always by 08P01."""
    standing_by = PostgresqlDatabase(make_url(postgresql_url).set(drivername="postgresql+psycopg"), 600.0)

    def told(connection: Connection) -> None:
        connection.execute(text(f"DO $$ BEGIN RAISE '{said}' USING ERRCODE = '08P01'; END $$"))

    monkeypatch.setattr(leader, "lock", told)
    with pytest.raises(StoreUnreachable, match=f"cannot be reached: {re.escape(said)}") as found:
        standing_by.open(writes=True)
    assert standby._may_pass(found.value, standby=False)


def test_a_pooler_whose_places_are_all_taken_is_waited_for() -> None:
    error = StoreUnreachable("cannot be reached: FATAL:  no more connections allowed (max_client_conn)")
    assert standby._may_pass(error, standby=False)


def test_a_password_that_no_file_has_is_not_waited_for() -> None:
    error = StoreUnreachable("cannot be reached: connection failed: fe_sendauth: no password supplied")
    assert not standby._may_pass(error, standby=True)


class NoPorts(StandbyPorts):
    """Opens none."""

    def __init__(self) -> None:
        self.address = self.admin_address = ""

    async def open(self) -> None:
        """Nothing."""

    async def close(self, grace_s: float) -> None:
        """Nothing."""


def test_a_standby_says_what_it_waits_for_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The database comes back, and another server leads; then a third one; it goes, and nobody does."""
    away = StoreUnreachable("db.example cannot be reached")
    led, later = LedByAnother("b:1"), LedByAnother("c:2")
    causes = iter([away, away, led, led, later, later, away, ValueError("enough")])

    def begin(waited_s: float | None) -> Recovered:
        raise next(causes)

    async def at_once(stop: asyncio.Event) -> None:
        """No second goes by."""

    monkeypatch.setattr(standby, "_pause", at_once)
    caplog.set_level("INFO", standby.__name__)
    config = server_config(tmp_path / "data", server={"standby": True})
    with pytest.raises(ValueError, match="enough"):
        asyncio.run(await_turn(begin, config, NoPorts(), asyncio.Event()))
    waits = "waiting for the database: db.example cannot be reached"
    said = [r.message for r in caplog.records if r.name == standby.__name__]
    leads = [f"standing by: {owner} leads this run" for owner in ("b:1", "c:2")]
    assert said == [waits, *leads, waits]


@pytest.mark.parametrize(
    "lack",
    [
        PermissionError(13, "Permission denied"),
        StoreNewer("run.rules is 99, and 2 is the newest known here"),
        ConfigError("privacy.key is missing"),
    ],
)
def test_what_stands_in_the_way_of_a_takeover_is_said_and_ends_no_wait(
    tmp_path: Path, lack: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    causes = iter([LedByAnother("b:1"), LedByAnother("b:1"), ValueError("enough")])

    def begin(waited_s: float | None) -> Recovered:
        raise next(causes)

    def check() -> None:
        raise lack

    config = server_config(tmp_path / "data", server={"standby": True})
    with pytest.raises(ValueError, match="enough"):
        asyncio.run(await_turn(begin, config, NoPorts(), asyncio.Event(), check=check))
    said = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert said == [f"this standby cannot take over as it is: {lack}"]


def test_a_wait_is_said_again_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The database does not answer for ten hours, of which a look takes a second."""
    seconds = itertools.count()
    begun: list[float | None] = []

    def begin(waited_s: float | None) -> Recovered:
        begun.append(waited_s)
        if len(begun) > 36_000:
            raise ValueError("enough")
        raise StoreUnreachable("db.example cannot be reached")

    async def at_once(stop: asyncio.Event) -> None:
        """No second goes by."""

    async def here(function: Callable[..., Any], *values: Any) -> Any:
        return function(*values)

    monkeypatch.setattr(standby, "_pause", at_once)
    monkeypatch.setattr(asyncio, "to_thread", here)
    monkeypatch.setattr(standby, "time", SimpleNamespace(monotonic=lambda: next(seconds) / 2))
    with pytest.raises(ValueError, match="enough"):
        asyncio.run(await_turn(begin, server_config(tmp_path / "data"), NoPorts(), asyncio.Event()))
    said = [(r.levelname, r.message) for r in caplog.records if r.name == "anabranch.server.standby"]
    assert {level for level, _ in said} == {"WARNING"}
    assert 8 <= len(said) <= 12  # at once, after a minute, two, four ...
    assert all(text.endswith("db.example cannot be reached") for _, text in said)
    assert said[0][1].startswith("waiting for the database: ")
