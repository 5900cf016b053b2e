"""`server.database` opens the right store, and says what is wrong with it without its password."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from own_parts import forgotten
from psycopg.conninfo import conninfo_to_dict

from anabranch.core.errors import ConfigError, StoreError
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.server.store import factory
from anabranch.server.store.base import DiskFailed, RunInfo
from anabranch.server.store.factory import open_store
from anabranch.server.store.memory import MemoryBlobs, MemoryStore
from anabranch.server.store.postgresql import PostgresqlDatabase
from anabranch.server.store.postgresql_store import PostgresqlStore
from anabranch.server.store.sqlite_store import SqliteStore

INFO = RunInfo("run-1", "n", {}, [], "ab" * 32, 0.0)


def test_nothing_is_sqlite_in_the_data_directory(tmp_path: Path) -> None:
    folder = tmp_path / "a%20b?c#d ü"
    store = open_store("", folder)
    assert isinstance(store, SqliteStore)
    assert not folder.exists()
    store.start(INFO)
    assert (folder / "anabranch.db").exists()
    assert (folder / "anabranch.db").stat().st_mode & 0o077 == 0
    store.close()


def test_memory_is_memory(tmp_path: Path) -> None:
    assert isinstance(open_store("memory", tmp_path), MemoryStore)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_an_address_is_postgresql(scheme: str, tmp_path: Path) -> None:
    assert isinstance(open_store(f"{scheme}://me:secret@nowhere/db", tmp_path), PostgresqlStore)


@pytest.mark.parametrize(
    "hosts",
    [
        *("a:5432,b-2.example:5433", "a:5432,b", "a,b:5433", "10.0.0.1,10.0.0.2"),
        *("[2001:db8::1]:5432,[2001:DB8::2]:5433", "a,[::1]:5433"),
        *("[fe80::1%25eth0]:5432", "[fe80::1%25eth0.1]:5432,[::1]:5433"),
    ],
)
@pytest.mark.parametrize("query", ["", "&host=c,d&port=1,2"])
def test_hosts_are_listed_as_libpq_lists_them(hosts: str, query: str, tmp_path: Path) -> None:
    """By its own reading of the same address: which hosts, by which ports, in which order."""
    address = f"postgresql://me:secret@{hosts}/db?target_session_attrs=read-write{query}"
    database = PostgresqlDatabase(factory._postgresql(address))
    engine = database._new_engine()
    (_, given) = engine.dialect.create_connect_args(database.url)
    names = ("host", "port", "user", "password", "dbname", "target_session_attrs")
    libpq = conninfo_to_dict(address)
    assert {n: str(given[n]) for n in names if n in given} == {n: libpq[n] for n in names if n in libpq}
    assert "secret" not in database.name
    assert all(host in unquote(database.name) for host in str(libpq["host"]).split(","))


@pytest.mark.parametrize(
    "database",
    [
        "mysql://me:secret@host/db",
        "postgresql://me:secret@host:port/db",
        "postgresql://me:secret@host/",
        "postgresql://me:p@secret@host/db",
        "postgresql://me:p@secret/w#rd@host/db",
        "postgresql://me:p@secret:1,secret:2@host/db",
        "postgresql://me:p@secret:1,secret:port/db",
        "postgresql://me:secret@a,b/db?port=5433",
        "me:secret@host",
        "data.db",
    ],
)
def test_another_address_is_refused_without_its_password(database: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.database") as caught:
        open_store(database, tmp_path)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


class Older(MemoryBlobs):
    """Of a store that was written before there was `cool`."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("cool", "spooled"):
            raise AttributeError(name)
        return super().__getattribute__(name)


class OlderStore(SqliteStore):
    name = "older"
    blobs: Any = Older(DEFAULT_LIMITS)

    @classmethod
    def of(cls, database: str, data_dir: Path, *_: Any) -> OlderStore:
        return cls(factory._sqlite_file(data_dir), data_dir)


def test_what_the_blobs_of_ones_own_store_lack_is_said_at_the_start(tmp_path: Path) -> None:
    with (
        forgotten(),
        pytest.raises(ConfigError, match=r"OlderStore: its blobs lack cool, spooled; see docs/"),
    ):
        open_store(f"{__name__}:OlderStore", tmp_path)


class Made(MemoryStore):
    """It has its blobs once it is made, as many have."""

    name = "made"

    @classmethod
    def of(cls, database: str, data_dir: Path, limits: Any, lease_s: float) -> Any:
        return cls(limits)


class Nothing(Made):
    name = "nothing"

    @classmethod
    def of(cls, *_: Any) -> Any:
        return None


class LeaseOfACall(Made):
    name = "leases"

    def lease_s(self) -> float:  # type: ignore[override]
        return 0.0


def test_a_store_of_ones_own_may_have_its_blobs_once_it_is_made(tmp_path: Path) -> None:
    with forgotten():
        assert isinstance(open_store(f"{__name__}:Made", tmp_path), Made)


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("Nothing", "of must give the store, not None"),
        ("LeaseOfACall", "its lease_s must be seconds, 0 for none, not a method"),
    ],
)
def test_what_is_no_store_once_it_is_made_is_said_at_the_start(store: str, said: str, tmp_path: Path) -> None:
    with forgotten(), pytest.raises(ConfigError, match=said):
        open_store(f"{__name__}:{store}", tmp_path)


def test_a_password_may_have_what_is_quoted(tmp_path: Path) -> None:
    assert isinstance(open_store("postgresql://me:p%40s/s#w?rd@nowhere/db", tmp_path), PostgresqlStore)


def test_a_database_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    store = open_store(f"postgresql://me:secret@/db?host={tmp_path}", tmp_path)
    with pytest.raises(StoreError) as caught:
        store.start(INFO)
    assert "me:***@" in str(caught.value)
    assert "secret" not in str(caught.value)
    store.close()


def test_reading_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    store = open_store("", tmp_path)
    with pytest.raises(StoreError, match="does not exist"):
        list(store.records())
    assert list(tmp_path.iterdir()) == []


def test_a_data_folder_that_cannot_be_made_is_only_misplaced() -> None:
    """Nothing was on any disk that a restart could find out about."""
    store = open_store("", Path("/proc/no-such-folder/data"))
    with pytest.raises(StoreError, match="check data_dir") as refused:
        store.start(INFO)
    assert not isinstance(refused.value, DiskFailed)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("postgres://me:other@HOST/name", True),
        ("postgresql+psycopg://me@host:5432/name", True),
        ("postgresql://host/name?user=me&application_name=two", True),
        ("postgresql://me@host,standby/name?target_session_attrs=read-write", True),
        ("postgresql://me@/name?host=host", True),
        ("postgresql://me@/name?host=host:5432", True),
        ("postgresql://me@/name?host=standby:5433&host=host:5432", True),
        ("postgresql://me@/name?host=standby&host=host", True),
        ("postgresql://me@/name?host=host:5433", False),
        ("postgresql://me@/name?host=standby:5432&host=host:5433", False),
        ("postgresql://me@host:5433/name", False),
        ("postgresql://me@elsewhere/name", False),
        ("postgresql://me@host/other", False),
        ("postgresql://you@host/name", False),
        ("postgresql://me@host/name?options=-csearch_path%3Dmine", False),
        ("memory", False),
        ("", False),
    ],
)
def test_one_database_may_be_spelt_in_several_ways(other: str, same: bool) -> None:
    address = "postgresql://me:secret@host/name"
    assert factory.is_same_database(address, other) is same
    assert factory.is_same_database(other, address) is same
    assert factory.is_same_database(other, other)
