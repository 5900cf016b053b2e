"""Stores under test: how to open each kind, how to mistreat it, and what to put in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from sqlalchemy import text

from anabranch.core import events as ev
from anabranch.core.effects import Decided, Effect, Published
from anabranch.core.journal import Record, line, to_record
from anabranch.core.limits import Limits
from anabranch.core.model.updates import (
    Ask,
    Capability,
    Decision,
    LocalPlan,
    Reason,
    Receipt,
    Task,
    Update,
    Verdict,
)
from anabranch.core.snapshot import FORMAT, Array, Snapshot
from anabranch.server.store.base import Entry, Projection, RunInfo, Store
from anabranch.server.store.factory import open_store
from anabranch.server.store.memory import MemoryStore
from anabranch.server.store.sql import SqlStore

FLIP = (
    "UPDATE chunks SET data = set_byte(data, length(data) - 1, get_byte(data, length(data) - 1) # 1) "
    "WHERE kind = "
)
INFO = RunInfo("run-1", "prüfung ✓", {"run": {"seed": 3}}, [["w", [4], "float32"]], "ab" * 32, 17.5)
LIMITS = Limits(inline_bytes_max=64, free_disk_bytes_min=0)


History = tuple[list[Entry], list[Projection]]


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


def enrolled(client: str = "c1", now: float = 1.0) -> Entry:
    return Entry(to_record(ev.Enrolled(now, client, Capability(examples=7))))


def asked(task: str, client: str = "c1") -> Entry:
    return Entry(to_record(ev.TaskAsked(2.0, Ask(client, task))))


def update(number: int, data: bytes = b"", task: str = "", flaw: str = "", now: float = 3.0) -> Entry:
    data = data or f"payload {number}".encode()
    payload = ev.Payload(hashlib.sha256(data).hexdigest(), len(data))
    made = Update(f"u{number}", task or f"t{number}", "c1", 0, 5, np.empty(0, np.float32))
    return Entry(to_record(ev.UpdateArrived(now, made, payload, flaw)), data)


def reference(entry: Entry) -> ev.Payload:
    return ev.Payload(**entry.record["payload"])


def task(task_id: str, client: str = "c1") -> Task:
    return Task(task_id, client, 0, 2.0, 62.0, 60.0, 1, LocalPlan())


def decided(number: int, decision: Decision, version: int = 1, task_id: str = "") -> Decided:
    named = "c1", reference(update(number)).sha256
    return Decided("c1", Receipt(f"u{number}", task_id or f"t{number}", version, decision, *named), 5)


def published(version: int, *numbers: int) -> Published:
    return Published(version, np.zeros(4, np.float32), tuple(f"u{n}" for n in numbers))


def upload(store: Store, data: bytes, update_id: str) -> str:
    sha256 = hashlib.sha256(data).hexdigest()
    store.blobs.write(update_id, 0, data)
    assert bytes(store.blobs.seal(update_id, sha256)) == data
    store.blobs.adopt(update_id, sha256)
    return sha256


def snapshot(version: int) -> Snapshot:
    arrays: dict[str, Array] = {
        "vector": np.arange(4, dtype=np.float32) + version,
        "history/0": np.arange(6, dtype=np.float64).reshape(2, 3)[:, ::2],
        "strategy/scale": np.asarray(2.5),
        "strategy/none": np.empty(0, np.int64),
    }
    return Snapshot({"format": FORMAT, "version": version, "clients": ["ü", "c1"], "x": 0.1 + 0.2}, arrays)


GOOD = Decision(Verdict.HELD, 2, 0.1 + 0.2)
NOW_GOOD = Decision(Verdict.PUBLISHED, 0, 1.0)
BAD = Decision(Verdict.REJECTED, 9, None, Reason.STALE, "staleness 9 is over the bound of 4 · ✗")


def logged(store: Store) -> list[tuple[int, Record]]:
    return list(store.records())


def numbered(records: Sequence[Entry], first: int = 1) -> list[tuple[int, Record]]:
    return list(enumerate((json.loads(line(e.record)) for e in records), first))


def project(seq: int, *effects: Effect, **digests: str) -> Projection:
    return Projection(seq, 10.0 + seq, effects, {int(v[1:]): d for v, d in digests.items()})
