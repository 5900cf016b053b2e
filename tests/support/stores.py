"""Stores under test: how to open each kind, how to mistreat it, and what to put in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Table, func, select, text

from anabranch.core.limits import Limits
from anabranch.server.store.base import Store
from anabranch.server.store.factory import open_store
from anabranch.server.store.memory import MemoryStore
from anabranch.server.store.sql import SqlStore
from anabranch.testing.store import INFO

FLIP = (
    "UPDATE chunks SET data = set_byte(data, length(data) - 1, get_byte(data, length(data) - 1) # 1) "
    "WHERE kind = "
)

LIMITS = Limits(inline_bytes_max=64, free_disk_bytes_min=0)

# Kinds for what stands on a store and asks no more of it than what tests beside it ask of each kind.
_DEAR = pytest.param("postgresql", marks=pytest.mark.prove)
BACKENDS = pytest.mark.parametrize("backend", ["memory", "sqlite", _DEAR], indirect=True)
ON_DISK = pytest.mark.parametrize("on_disk", ["sqlite", _DEAR], indirect=True)


def row_counts(store: Store, tables: Iterable[Table]) -> dict[str, int]:
    """How many rows each table has, by its name."""
    assert isinstance(store, SqlStore)
    with store._database.transaction() as connection:
        return {t.name: connection.scalar(select(func.count()).select_from(t)) or 0 for t in tables}


@dataclass
class Backend:
    """A kind of store, and the ways to mistreat it."""

    kind: str
    database: str
    folder: Path
    memory: MemoryStore | None = None

    def open(self, limits: Limits = LIMITS) -> Store:
        """The store, not started."""
        return self.memory if self.memory is not None else open_store(self.database, self.folder, limits)

    def start(self, limits: Limits = LIMITS) -> Store:
        """The store, started."""
        store = self.open(limits)
        store.start(INFO)
        return store

    def execute(self, statement: str, **values: Any) -> None:
        """Change the database behind the store's back, whatever run it has, if any."""
        store = self.open()
        assert isinstance(store, SqlStore)
        store.start(store.info() or INFO)
        with store._database.writing() as connection:
            connection.execute(text(statement), values)
        store.close()

    def damage(self, what: str) -> None:
        """Flip a byte in the newest snapshot or in every payload that is a blob."""
        if self.memory is not None:
            self._damage_memory(self.memory, what)
            return
        if self.kind == "postgresql":
            newest = "AND at = (SELECT max(at) FROM chunks WHERE kind = 'snapshot')"
            self.behind(FLIP + ("'snapshot' " + newest if what == "snapshot" else "'payload'"))
            return
        if what == "snapshot":
            paths = [max(self.folder.glob("snapshots/*"), key=lambda p: p.stat().st_mtime_ns)]
        else:
            paths = list(self.folder.glob("blobs/*/*"))
        assert paths
        for path in paths:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)

    def behind(self, statement: str) -> None:
        """Change PostgreSQL behind the back of a store that is open."""
        with psycopg.connect(self.database, autocommit=True) as admin:
            assert admin.execute(statement.encode()).rowcount > 0, statement

    def lose(self, sha256: str) -> None:
        """Remove a large payload, or a snapshot."""
        if self.kind == "postgresql":
            self.behind(f"DELETE FROM chunks WHERE sha256 = '{sha256}'")
        else:
            (path,) = [*self.folder.glob(f"blobs/*/{sha256}"), *self.folder.glob(f"snapshots/{sha256}.*")]
            path.unlink()

    def snapshots(self) -> list[str]:
        """The digests of the snapshots that are kept, oldest first."""
        if self.kind == "postgresql":
            with psycopg.connect(self.database) as admin:
                query = b"SELECT sha256 FROM chunks WHERE kind = 'snapshot' ORDER BY at"
                return [row[0] for row in admin.execute(query)]
        paths = sorted(self.folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime_ns)
        return [path.stem for path in paths]

    def _damage_memory(self, store: MemoryStore, what: str) -> None:
        if what == "snapshot":
            kept = store.books.snapshots[-1]
            kept.data = kept.data[:-1] + bytes([kept.data[-1] ^ 1])
        else:
            for sha256, data in store.blobs.payloads.items():
                store.blobs.payloads[sha256] = data[:-1] + bytes([data[-1] ^ 1])


def make_backend(kind: str, folder: Path, request: pytest.FixtureRequest) -> Backend:
    """A store of that kind, not started; PostgreSQL is started for it."""
    if kind == "memory":
        return Backend(kind, "memory", folder, MemoryStore(LIMITS))
    return Backend(kind, "" if kind == "sqlite" else request.getfixturevalue("postgresql_url"), folder)


def on_disk_fixture(*kinds: Any) -> Any:
    """The fixture `on_disk`: a backend of each of these kinds, with files, tables and locks."""

    @pytest.fixture(params=kinds)
    def on_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
        return make_backend(request.param, tmp_path / "data", request)

    return on_disk


def sqlite_first() -> Any:
    """A file's own `on_disk`, where the log is asked more often than what is PostgreSQL's about it."""
    return on_disk_fixture("sqlite", pytest.param("postgresql", marks=pytest.mark.slow))
