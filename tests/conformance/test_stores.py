"""Every store passes this suite: memory, SQLite, PostgreSQL."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from sqlalchemy import text

from anabranch.core import events as ev
from anabranch.core.effects import Decided, Effect, Granted, LeaseEnd, LeaseEnded, Published
from anabranch.core.errors import ManifestMismatch, StoreCorrupt, StoreError, StoreFull, StoreLocked
from anabranch.core.journal import Record, line, to_record
from anabranch.core.limits import Limits
from anabranch.core.snapshot import Array, Snapshot
from anabranch.core.updates import (
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
from anabranch.server.store.base import DiskFailed, Entry, Projection, RunInfo, Store
from anabranch.server.store.factory import open_store
from anabranch.server.store.memory import MemoryStore
from anabranch.server.store.sql import SqlStore

INFO = RunInfo("run-1", "prüfung ✓", {"run": {"seed": 3}}, [["w", [4], "float32"]], "ab" * 32, 17.5)
LIMITS = Limits(inline_bytes_max=64, free_disk_bytes_min=0)


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
        """Change the database behind the store's back."""
        store = self.open()
        assert isinstance(store, SqlStore)
        store.start(INFO)
        with store._database.writing() as connection:
            connection.execute(text(statement), values)
        store.close()

    def damage(self, what: str) -> None:
        """Flip a byte in the newest snapshot or in every payload that is a blob."""
        if self.memory is not None:
            self._damage_memory(self.memory, what)
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

    def _damage_memory(self, store: MemoryStore, what: str) -> None:
        if what == "snapshot":
            kept = store.books.snapshots[-1]
            kept.data = kept.data[:-1] + bytes([kept.data[-1] ^ 1])
        else:
            for sha256, data in store.blobs.payloads.items():
                store.blobs.payloads[sha256] = data[:-1] + bytes([data[-1] ^ 1])


def make_backend(kind: str, folder: Path, request: pytest.FixtureRequest) -> Backend:
    if kind == "memory":
        return Backend(kind, "memory", folder, MemoryStore(LIMITS))
    return Backend(kind, "" if kind == "sqlite" else request.getfixturevalue("postgresql_url"), folder)


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return make_backend(request.param, tmp_path / "data", request)


@pytest.fixture(params=["sqlite", "postgresql"])
def on_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """A backend with files, tables and locks."""
    return make_backend(request.param, tmp_path / "data", request)


@pytest.fixture
def store(backend: Backend) -> Iterator[Store]:
    opened = backend.start()
    yield opened
    opened.close()


# --- builders --------------------------------------------------------------------------------


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
    return Decided("c1", Receipt(f"u{number}", task_id or f"t{number}", version, decision), 5)


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
    return Snapshot({"version": version, "clients": ["ü", "c1"], "x": 0.1 + 0.2}, arrays)


GOOD = Decision(Verdict.HELD, 2, 0.1 + 0.2)
NOW_GOOD = Decision(Verdict.PUBLISHED, 0, 1.0)
BAD = Decision(Verdict.REJECTED, 9, None, Reason.STALE, "staleness 9 is over the bound of 4 · ✗")


def logged(store: Store) -> list[tuple[int, Record]]:
    return list(store.records())


def numbered(records: Sequence[Entry], first: int = 1) -> list[tuple[int, Record]]:
    return list(enumerate((json.loads(line(e.record)) for e in records), first))


# --- the log ---------------------------------------------------------------------------------


def test_events_come_back_as_they_went_in(store: Store) -> None:
    entries = [enrolled("ü✓\U0001f680"), asked("t1"), update(1), update(2, flaw="NaN\0 in tensor 'w'")]
    assert store.append(entries) == [1, 2, 3, 4]
    assert logged(store) == numbered(entries)
    assert store.append([enrolled("c2")]) == [5]
    assert [seq for seq, _ in store.records()] == [1, 2, 3, 4, 5]


def test_more_events_than_a_page_come_in_order_while_others_are_written(store: Store) -> None:
    for _ in range(3):
        store.append([asked(f"t{i}") for i in range(400)])
    records = store.records()
    first = next(records)
    store.append([asked("late")])
    assert [first[0], *(seq for seq, _ in records)] == list(range(1, 1202))


def test_an_empty_batch_is_nothing(store: Store) -> None:
    assert store.append([]) == []
    assert store.append((), ()) == []
    assert logged(store) == []


def test_an_update_counts_once(store: Store) -> None:
    assert store.append([update(1), update(1, b"other bytes")]) == [1, None]
    assert store.append([update(1), update(2), asked("t3"), update(2)]) == [None, 2, 3, None]
    assert [(seq, r["kind"]) for seq, r in store.records()] == [(1, "update"), (2, "update"), (3, "asked")]
    assert bytes(store.payload(reference(update(1)))) == b"payload 1"
    assert store.problems() == []


def test_all_is_there_after_closing_and_opening_again(backend: Backend) -> None:
    store = backend.start()
    entries = [enrolled(), asked("t1"), update(1)]
    store.append(entries)
    store.close()
    store.close()  # harmless
    again = backend.open()
    assert again.start(replace(INFO, run_id="run-2", created_at=99.0)) == INFO
    assert logged(again) == numbered(entries)
    assert again.append([update(1), update(2)]) == [None, 4]
    again.close()


def test_before_start_a_store_only_reads(backend: Backend) -> None:
    first = backend.start()
    first.append([update(1)])
    first.close()
    reader = backend.open()
    assert reader.info() == INFO
    assert len(logged(reader)) == 1
    assert reader.problems() == []
    with pytest.raises(StoreError, match="start"):
        reader.append([update(2)])
    reader.close()


def test_there_is_no_run_in_a_new_store(backend: Backend) -> None:
    store = backend.open()
    assert store.info() is None
    store.close()
    assert not backend.folder.exists()  # looking leaves no traces


def test_another_model_is_refused(backend: Backend) -> None:
    backend.start().close()
    store = backend.open()
    with pytest.raises(ManifestMismatch, match="layout"):
        store.start(replace(INFO, layout=[["w", [5], "float32"]]))
    with pytest.raises(ManifestMismatch, match="initial weights"):
        store.start(replace(INFO, initial_sha256="cd" * 32))
    store.start(INFO)
    store.close()


# --- payloads --------------------------------------------------------------------------------


def test_small_payloads_are_kept_inline_and_large_ones_as_blobs(store: Store) -> None:
    large = bytes(range(256)) * 40
    upload(store, large, "u2")
    entries = [update(1), replace(update(2, large), inline=None), update(3, b"\0")]
    store.append(entries)
    for entry, data in zip(entries, (b"payload 1", large, b"\0"), strict=True):
        assert bytes(store.payload(reference(entry))) == data
    assert store.problems() == []


def test_a_large_update_needs_its_blob(store: Store) -> None:
    with pytest.raises(StoreError, match="adopt it first"):
        store.append([asked("t1"), replace(update(1), inline=None)])
    assert logged(store) == []
    # What was found to be flawed is recorded, its bytes are not needed.
    assert store.append([replace(update(1, flaw="truncated"), inline=None)]) == [1]
    assert store.problems() == []


@pytest.mark.parametrize("missing", [False, True])
def test_a_damaged_blob_is_found(backend: Backend, missing: bool) -> None:
    store = backend.start()
    sha256 = upload(store, b"x" * 1000, "u1")
    entry = replace(update(1, b"x" * 1000), inline=None)
    store.append([entry])
    backend.damage("blobs")
    if missing and isinstance(store, SqlStore):
        store.blobs.path(sha256).unlink()
    with pytest.raises(StoreCorrupt, match=sha256):
        store.payload(reference(entry))
    (problem,) = store.problems()
    assert "u1" in problem
    store.close()


def test_an_unknown_payload_is_an_error(store: Store) -> None:
    with pytest.raises(StoreCorrupt):
        store.payload(ev.Payload("0" * 64, 1))


def test_a_damaged_inline_payload_is_found(on_disk: Backend) -> None:
    store = on_disk.start()
    store.append([update(1)])
    store.close()
    on_disk.execute("UPDATE updates SET payload = :data", data=b"payload x")
    store = on_disk.open()
    with pytest.raises(StoreCorrupt):
        store.payload(reference(update(1)))
    assert len(store.problems()) == 1
    store.close()


# --- projections -----------------------------------------------------------------------------


def project(seq: int, *effects: Effect, **digests: str) -> Projection:
    return Projection(seq, 10.0 + seq, effects, {int(v[1:]): d for v, d in digests.items()})


@pytest.fixture
def a_history() -> tuple[list[Entry], list[Projection]]:
    """Two updates in version 1, one rejected, one held, one in version 2, and one not yet decided."""
    entries = [asked("t1"), update(1), update(2), update(3), update(4), update(5), update(6)]
    return entries, [
        project(1, Granted(task("t1"))),
        project(2, decided(1, GOOD, 0)),
        project(3, decided(2, NOW_GOOD, 1), published(1, 1, 2), v1="aa" * 32),
        project(4, decided(3, BAD, 1)),
        project(5, decided(4, GOOD, 1)),
        project(6, decided(5, NOW_GOOD, 2), published(2, 4, 5)),
    ]


def test_projections_are_read_back(store: Store, a_history: tuple[list[Entry], list[Projection]]) -> None:
    entries, projections = a_history
    store.append(entries)
    assert store.receipt("u1") is None
    store.append([], projections)
    for number, decision, version in ((1, GOOD, 0), (2, NOW_GOOD, 1), (3, BAD, 1), (5, NOW_GOOD, 2)):
        assert store.receipt(f"u{number}") == Receipt(f"u{number}", f"t{number}", version, decision)
    assert store.receipt("u6") is None
    assert store.receipt("never seen") is None
    one, two = store.versions()
    assert (one.version, one.sha256, one.updates, one.published_at) == (1, "aa" * 32, 2, 13.0)
    assert (two.version, two.sha256, two.updates, two.snapshot) == (2, None, 2, False)
    assert store.versions(after=1) == [two]
    assert store.versions(limit=1) == [one]
    assert store.problems() == []


def test_projections_may_be_written_again(
    store: Store, a_history: tuple[list[Entry], list[Projection]]
) -> None:
    entries, projections = a_history
    store.append(entries)
    store.append([], projections)
    before = (store.versions(), [store.receipt(f"u{i}") for i in range(1, 7)])
    store.append([update(7)], [*projections, project(7, decided(6, NOW_GOOD, 3), published(3, 6))])
    store.append([], projections[2:4])
    assert (store.versions()[:2], [store.receipt(f"u{i}") for i in range(1, 6)]) == (before[0], before[1][:5])
    assert store.problems() == []


def test_a_digest_may_come_late_and_then_stays(
    store: Store, a_history: tuple[list[Entry], list[Projection]]
) -> None:
    entries, projections = a_history
    store.append(entries, ())
    store.append([], [*projections, project(7, v2="bb" * 32), project(7, v1="cc" * 32)])
    assert [v.sha256 for v in store.versions()] == ["aa" * 32, "bb" * 32]


def test_a_duplicate_changes_nothing(store: Store) -> None:
    store.append([update(1)])
    store.append([], [project(1, decided(1, GOOD))])
    store.append([], [project(1, replace(decided(1, BAD), duplicate=True))])
    receipt = store.receipt("u1")
    assert receipt is not None
    assert receipt.decision == GOOD


def test_numbers_and_text_that_no_column_holds_are_no_obstacle(store: Store) -> None:
    entry = update(1)
    entry.record["base_version"] = entry.record["examples"] = (1 << 64) - 1
    store.append([entry, Entry(to_record(ev.TaskDropped(1.0, "c1", "t1", "why\0\ud800")))])
    bad = replace(BAD, staleness=1 << 64, detail="a\0b\ud800")
    store.append([], [project(1, decided(1, bad))])
    assert logged(store)[0][1]["base_version"] == (1 << 64) - 1
    receipt = store.receipt("u1")
    assert receipt is not None
    assert receipt.decision.reason is Reason.STALE


def test_metrics_are_kept_by_version(store: Store, a_history: tuple[list[Entry], list[Projection]]) -> None:
    store.append(a_history[0])
    store.append([], a_history[1])
    store.add_metrics(1, {"accuracy": 0.25, "loss": 2.0}, 20.0)
    store.add_metrics(1, {"accuracy": 0.5, "loss": float("nan")}, 21.0)
    store.add_metrics(7, {"accuracy": 1.0}, 22.0)  # of a version that is not projected yet
    store.add_metrics(2, {}, 23.0)
    assert [dict(v.metrics) for v in store.versions()] == [{"accuracy": 0.5, "loss": 2.0}, {}]


# --- snapshots -------------------------------------------------------------------------------


def same(one: Snapshot, other: Snapshot) -> bool:
    names = set(one.arrays) == set(other.arrays)
    return (
        one.meta == other.meta
        and names
        and all(
            a.dtype == other.arrays[n].dtype and np.array_equal(a, other.arrays[n])
            for n, a in one.arrays.items()
        )
    )


def test_a_snapshot_comes_back_with_what_is_after_it(store: Store) -> None:
    entries = [asked(f"t{i}") for i in range(5)]
    store.append(entries)
    assert store.load().snapshot is None
    assert list(store.load().tail) == numbered(entries)
    store.save_snapshot(snapshot(0), 3, 5.0)
    found = store.load()
    assert found.snapshot is not None
    assert same(found.snapshot, snapshot(0))
    assert all(array.flags.writeable for array in found.snapshot.arrays.values())
    assert found.applied_through_seq == 3
    assert list(found.tail) == numbered(entries[3:], 4)


def test_a_snapshot_is_a_copy(store: Store) -> None:
    mine = snapshot(0)
    store.save_snapshot(mine, 0, 5.0)
    mine.arrays["vector"][:] = -1
    found = store.load().snapshot
    assert found is not None
    assert same(found, snapshot(0))


def test_the_newest_three_are_kept_and_bad_ones_passed_over(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    store = backend.start()
    store.append([asked(f"t{i}") for i in range(9)])
    for version in range(5):
        store.save_snapshot(snapshot(version), version + 1, 5.0)
        store.save_snapshot(snapshot(version), version + 1, 6.0)  # the same again is no other
    if backend.memory is None:
        assert len(list(backend.folder.glob("snapshots/*"))) == 3
    assert store.problems() == []
    for seq in (5, 4, 3, 0):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            found = store.load()
        assert found.applied_through_seq == seq
        assert [s for s, _ in found.tail] == list(range(seq + 1, 10))
        assert len(caplog.records) == len(store.problems()) == (5 - seq if seq else 3)
        if seq:
            _damage_snapshot(backend, seq - 1)
    store.close()


def _damage_snapshot(backend: Backend, version: int) -> None:
    """Flip a byte of one version's snapshot."""
    wanted = snapshot(version).arrays["vector"].tobytes()
    if backend.memory is not None:
        (kept,) = [k for k in backend.memory.books.snapshots if wanted in k.data]
        kept.data = kept.data.replace(wanted, wanted[:-1] + b"!")
        return
    (path,) = [p for p in backend.folder.glob("snapshots/*") if wanted in p.read_bytes()]
    path.write_bytes(path.read_bytes().replace(wanted, wanted[:-1] + b"!"))


def test_a_snapshot_file_that_is_gone_is_passed_over(on_disk: Backend) -> None:
    store = on_disk.start()
    store.append([asked("t1"), asked("t2")])
    store.save_snapshot(snapshot(1), 1, 5.0)
    before = set(on_disk.folder.glob("snapshots/*"))
    store.save_snapshot(snapshot(2), 2, 6.0)
    (newest,) = set(on_disk.folder.glob("snapshots/*")) - before
    newest.unlink()
    assert store.load().applied_through_seq == 1
    store.close()


def test_versions_say_which_have_a_snapshot(
    store: Store, a_history: tuple[list[Entry], list[Projection]]
) -> None:
    store.append(a_history[0])
    store.append([], a_history[1])
    store.save_snapshot(snapshot(1), 3, 5.0)
    assert [v.snapshot for v in store.versions()] == [True, False]


# --- faults ----------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_log_as_it_was(backend: Backend) -> None:
    store = backend.start()
    store.append([update(1)])
    store.close()
    full = backend.open(replace(LIMITS, free_disk_bytes_min=0))
    full.start(INFO)
    _fill(backend, full, True)
    for _ in range(2):
        with pytest.raises(StoreFull):
            full.append([update(2), update(3)])
    assert len(logged(full)) == 1
    assert full.receipt("u2") is None
    _fill(backend, full, False)
    assert full.append([update(2), update(3)]) == [2, 3]
    full.close()


def _fill(backend: Backend, store: Store, full: bool) -> None:
    if backend.memory is not None:
        backend.memory.events_max = 1 if full else 0
    else:
        assert isinstance(store, SqlStore)
        store._limits = replace(LIMITS, free_disk_bytes_min=1 << 60 if full else 0)


def test_a_store_below_the_watermark_does_not_start(on_disk: Backend) -> None:
    store = on_disk.open(replace(LIMITS, free_disk_bytes_min=1 << 60))
    with pytest.raises(StoreFull, match="watermark"):
        store.start(INFO)


def test_two_writers_are_one_too_many(on_disk: Backend) -> None:
    first = on_disk.start()
    with pytest.raises(StoreLocked, match="in use by process"):
        on_disk.start()
    assert first.append([update(1)]) == [1]
    reader = on_disk.open()  # looking is free
    assert len(logged(reader)) == 1
    reader.close()
    first.close()
    on_disk.start().close()


def test_two_writers_with_one_database_are_too_many(postgresql_url: str, tmp_path: Path) -> None:
    first = open_store(postgresql_url, tmp_path / "one", LIMITS)
    second = open_store(postgresql_url, tmp_path / "two", LIMITS)
    first.start(INFO)
    with pytest.raises(StoreLocked, match="another process writes there"):
        second.start(INFO)
    first.close()
    second.start(INFO)
    second.close()


def test_a_connection_that_is_cut_is_not_made_good_in_silence(postgresql_url: str, tmp_path: Path) -> None:
    store = open_store(postgresql_url, tmp_path, LIMITS)
    assert isinstance(store, SqlStore)
    store.start(INFO)
    store.append([update(1)])
    with store._database.transaction() as connection:
        backend = connection.scalar(text("SELECT pg_backend_pid()"))
    with psycopg.connect(postgresql_url, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", [backend])
    for _ in range(2):  # whoever has the lock may have written since: only a restart helps
        with pytest.raises(DiskFailed):
            store.append([update(2)])
    store.close()
    store.start(INFO)
    assert store.append([update(1), update(2)]) == [None, 2]
    store.close()


def test_a_failed_batch_leaves_nothing(
    on_disk: Backend, a_history: tuple[list[Entry], list[Projection]]
) -> None:
    store = on_disk.start()
    broken = [update(1), Entry(update(2).record, b"not of the size it says")]
    with pytest.raises(StoreError):
        store.append(broken, a_history[1])
    assert logged(store) == []
    assert store.append([update(2)]) == [1]
    store.close()


def test_a_database_that_is_full_says_so(on_disk: Backend) -> None:
    store = on_disk.start()
    assert isinstance(store, SqlStore)
    store.append([update(1)])
    with store._database.writing() as connection:
        for statement in FILL[on_disk.kind]:
            connection.execute(text(statement))
    with pytest.raises(StoreFull):
        store.append([update(2, b"x" * 100_000), update(3)])
    assert len(logged(store)) == 1
    with store._database.writing() as connection:
        for statement in EMPTY[on_disk.kind]:
            connection.execute(text(statement))
    assert store.append([update(2, b"x" * 100_000), update(3)]) == [2, 3]
    assert store.problems() == []
    store.close()


# SQLite's own cap on pages; for PostgreSQL, the error that it raises on a full disk.
FILL = {
    "sqlite": ("PRAGMA max_page_count = 1",),
    "postgresql": (
        (
            "CREATE FUNCTION no_space() RETURNS trigger AS "
            "$$ BEGIN RAISE EXCEPTION 'no space left' USING ERRCODE = 'disk_full'; END $$ LANGUAGE plpgsql"
        ),
        "CREATE TRIGGER no_space BEFORE INSERT ON updates EXECUTE FUNCTION no_space()",
    ),
}
EMPTY = {"sqlite": ("PRAGMA max_page_count = 1000000",), "postgresql": ("DROP TRIGGER no_space ON updates",)}


def test_the_database_flushes_every_commit(on_disk: Backend) -> None:
    store = on_disk.start()
    assert isinstance(store, SqlStore)
    wanted = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "mmap_size": 0}
    with store._database.transaction() as connection:
        if on_disk.kind == "sqlite":
            found = {name: connection.scalar(text(f"PRAGMA {name}")) for name in wanted}
            assert found == wanted
        else:
            assert connection.scalar(text("SHOW synchronous_commit")) == "on"
    store.close()


def test_links_in_place_of_files_are_refused(on_disk: Backend, tmp_path: Path) -> None:
    on_disk.start().close()
    (on_disk.folder / "lock").unlink()
    (on_disk.folder / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        on_disk.start()
    assert not (tmp_path / "elsewhere").exists()


WRITER = """
import sys
from pathlib import Path
from anabranch.core import events as ev
from anabranch.core.journal import to_record
from anabranch.server.store.base import DiskFailed, Entry, RunInfo
from anabranch.server.store.factory import open_store
store = open_store(sys.argv[1], Path(sys.argv[2]))
store.start(RunInfo("run-1", "n", {}, [["w", [4], "float32"]], "ab" * 32, 0.0))
while True:
    seqs = store.append([Entry(to_record(ev.Ticked(float(i)))) for i in range(5)])
    print(seqs[-1], flush=True)
"""


def test_what_was_acknowledged_survives_a_kill(on_disk: Backend) -> None:
    acknowledged = 0
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, on_disk.database, str(on_disk.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(20):
                acknowledged = int(writer.stdout.readline())
            writer.kill()
            acknowledged = max([acknowledged, *(int(n) for n in writer.stdout if n.endswith("\n"))])
        store = on_disk.start()
        assert [seq for seq, _ in store.records()][acknowledged - 1 :][0] == acknowledged
        assert store.problems() == []
        store.close()


BREAK: dict[str, tuple[str, str]] = {
    "a hole in the log": ("DELETE FROM events WHERE seq = 1", "numbered 2 to 7"),
    "no row for an update": ("DELETE FROM updates WHERE seq = 7", "without a row"),
    "another kind": ("UPDATE events SET kind = 'asked' WHERE seq = 7", "of an event of kind 'asked'"),
    "another update": ("UPDATE updates SET update_id = 'x' WHERE seq = 7", "differs from event 7"),
    "a task twice": ("UPDATE updates SET task_id = 't1' WHERE seq = 3", "'t1' counts 2 times"),
    "no reason": ("UPDATE updates SET reason = '' WHERE seq = 4", "without a reason"),
    "no weight": ("UPDATE updates SET weight = NULL WHERE seq = 2", "has no weight"),
    "a version missing": ("DELETE FROM model_versions WHERE version = 1", "not known"),
    "an update missing": ("UPDATE model_versions SET updates = 3 WHERE version = 1", "was made of 3"),
    "an order broken": (
        "UPDATE model_versions SET applied_through_seq = 2 WHERE version = 2",
        "fewer events",
    ),
    "a lease open": ("UPDATE leases SET state = 'leased'", "is open, but"),
    "a lease alone": ("UPDATE updates SET client_id = 'c9' WHERE seq = 2", "no update of it was taken"),
    "not decided": (
        "INSERT INTO snapshots VALUES (7, 2, 'ff', 0)",
        "'u6' is folded into a snapshot, but not decided",
    ),
    "a snapshot ahead": ("INSERT INTO snapshots VALUES (99, 2, 'ff', 0)", "ahead of the log"),
    "a snapshot gone": ("INSERT INTO snapshots VALUES (6, 2, 'ff', 0)", "cannot be read"),
}


@pytest.mark.parametrize("what", BREAK)
def test_problems_names_what_is_broken(
    on_disk: Backend, what: str, a_history: tuple[list[Entry], list[Projection]]
) -> None:
    store = on_disk.start()
    store.append(a_history[0])
    store.append([], a_history[1])
    assert store.problems() == []
    statement, words = BREAK[what]
    assert isinstance(store, SqlStore)
    _break(store, on_disk.kind, statement)
    assert any(words in problem for problem in store.problems()), store.problems()
    store.close()


def _break(store: SqlStore, kind: str, statement: str) -> None:
    """Change the tables, foreign keys or not."""
    connection = store._database._connection
    assert connection is not None
    if kind == "sqlite":
        raw = connection.connection.driver_connection
        assert raw is not None
        raw.execute("PRAGMA foreign_keys = OFF")
    with store._database.writing() as writing:
        if kind == "postgresql":
            writing.execute(text("SET LOCAL session_replication_role = replica"))
        writing.execute(text(statement))


def test_leases_end_as_the_effects_say(on_disk: Backend) -> None:
    store = on_disk.start()
    names = [f"t{i}" for i in range(1, 8)]
    store.append([*(asked(n) for n in names), update(1), update(2), update(3, task="t3"), update(4)])
    store.append([], [project(1, *(Granted(task(n)) for n in names), Granted(task("t1"), again=True))])
    unknown = Decision(Verdict.REJECTED, 0, None, Reason.UNKNOWN_TASK, "not yours")
    ends = [
        project(8, LeaseEnded(task("t1"), LeaseEnd.EXPIRED), decided(1, GOOD)),
        project(9, decided(2, BAD)),
        project(10, decided(3, unknown)),
        project(11, LeaseEnded(task("t4"), LeaseEnd.CANCELLED), LeaseEnded(task("t5"), LeaseEnd.DROPPED)),
        project(11, LeaseEnded(task("t6"), LeaseEnd.SUPERSEDED), LeaseEnded(task("t7"), LeaseEnd.EXPIRED)),
    ]
    store.append([], ends)
    assert isinstance(store, SqlStore)
    with store._database.transaction() as connection:
        rows = connection.execute(text("SELECT state FROM leases ORDER BY task_id")).scalars().all()
    assert rows == ["accepted", "rejected", "leased", "cancelled", "dropped", "superseded", "expired"]
    store.close()


def test_clients_are_entered_when_they_enrol(on_disk: Backend) -> None:
    store = on_disk.start()
    store.append([enrolled("c1", 1.0), enrolled("c1", 2.0), enrolled("c2", 3.0)])
    store.append([enrolled("c2", 9.0)])
    assert isinstance(store, SqlStore)
    with store._database.transaction() as connection:
        query = text("SELECT client_id, enrolled_at, seen_at FROM clients ORDER BY client_id")
        assert list(connection.execute(query)) == [("c1", 1.0, 2.0), ("c2", 3.0, 9.0)]
    store.close()
