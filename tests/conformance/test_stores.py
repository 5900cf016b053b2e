"""Every store passes the suite of `anabranch.testing`, and this one: memory, SQLite, PostgreSQL."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from stores import Backend

from anabranch.core.errors import ConfigError, LogLost, StoreCorrupt, StoreError
from anabranch.server.store.base import Mark, Store
from anabranch.server.store.factory import open_store
from anabranch.testing import StoreConformance
from anabranch.testing.store import INFO, asked, logged, reference, snapshot, update, upload


class TestStores(StoreConformance):
    @pytest.fixture
    def reopen(self, backend: Backend) -> Callable[[], Store]:
        return backend.open


# --- the log ---------------------------------------------------------------------------------


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


# --- payloads --------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [False, True])
def test_a_damaged_blob_is_found(backend: Backend, missing: bool) -> None:
    store = backend.start()
    sha256 = upload(store, b"x" * 1000, "u1")
    entry = replace(update(1, b"x" * 1000), inline=None)
    store.append([entry])
    backend.damage("blobs")
    if missing and backend.memory is None:
        backend.lose(sha256)
    with pytest.raises(StoreCorrupt, match=sha256):
        store.payload(reference(entry))
    (problem,) = store.problems()
    assert "u1" in problem
    store.close()


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


# --- snapshots -------------------------------------------------------------------------------


def test_the_newest_three_are_kept_and_bad_ones_passed_over(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    store = backend.start()
    store.append([asked(f"t{i}") for i in range(9)])
    for version in range(5):
        store.save_snapshot(snapshot(version), version + 1, 5.0)
        store.save_snapshot(snapshot(version), version + 1, 6.0)  # the same again is no other
    if backend.memory is None:
        assert len(backend.snapshots()) == 3
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
    if backend.kind == "postgresql":
        hexed = wanted.hex()
        flipped = f"replace(encode(data, 'hex'), '{hexed}', '{hexed[:-2]}21')"
        backend.behind(
            f"UPDATE chunks SET data = decode({flipped}, 'hex')"
            f" WHERE position('\\x{hexed}'::bytea in data) > 0"
        )
        return
    (path,) = [p for p in backend.folder.glob("snapshots/*") if wanted in p.read_bytes()]
    path.write_bytes(path.read_bytes().replace(wanted, wanted[:-1] + b"!"))


def test_a_snapshot_file_that_is_gone_is_passed_over(on_disk: Backend) -> None:
    store = on_disk.start()
    store.append([asked("t1"), asked("t2")])
    store.save_snapshot(snapshot(1), 1, 5.0)
    store.save_snapshot(snapshot(2), 2, 6.0)
    on_disk.lose(on_disk.snapshots()[-1])
    assert store.load().applied_through_seq == 1
    store.close()


def _keep_all(_: Path) -> None:
    pass


def _as_of_old_releases(data: Path) -> None:
    """They had no segments, and older ones no mark."""
    shutil.rmtree(data / "log")
    (data / "run.json").unlink()


def _without_mark(data: Path) -> None:
    _as_of_old_releases(data)
    (data / "acknowledged").unlink()


def _without_rows(data: Path) -> None:
    (data / "anabranch.db").unlink()


@pytest.mark.parametrize("left", [_keep_all, _as_of_old_releases, _without_mark, _without_rows])
def test_a_folder_of_a_run_on_sqlite_is_no_place_for_another_one(
    left: Callable[[Path], None], tmp_path: Path, postgresql_url: str
) -> None:
    """A setting that somebody forgot, or tries: its mark is left alone, and PostgreSQL gets no run."""
    store = open_store("", tmp_path / "data")
    store.start(INFO)
    store.append([asked("t1")])
    mark = Mark(INFO.run_id, 1, "ab" * 32)
    store.acknowledge(mark)
    store.close()
    left(tmp_path / "data")
    before = _bytes_in(tmp_path / "data")
    for _ in range(2):
        other = open_store(postgresql_url, tmp_path / "data")
        with pytest.raises(ConfigError, match=r"run-1 on SQLite.*leave it out"):
            other.start(replace(INFO, run_id="another"))
        assert open_store(postgresql_url, tmp_path / "data").info() is None
    assert _bytes_in(tmp_path / "data") == before


def _bytes_in(data: Path) -> dict[str, bytes]:
    """Of all files but SQLite's own, which readers make."""
    files = [path for path in data.rglob("*") if path.is_file() and not path.name.endswith(("-wal", "-shm"))]
    return {str(path.relative_to(data)): path.read_bytes() for path in files}


def test_a_folder_whose_mark_is_of_postgresql_takes_the_next_database(
    tmp_path: Path, postgresql_url: str
) -> None:
    """One that has a run, beside a run on SQLite whose mark an old release has written over."""
    store = open_store("", tmp_path / "data")
    store.start(INFO)
    store.append([asked("t1")])
    store.acknowledge(Mark("of PostgreSQL's former run", 1, "ab" * 32))
    store.close()
    another = replace(INFO, run_id="another")
    for folder in ("elsewhere", "data"):
        other = open_store(postgresql_url, tmp_path / folder)
        assert other.start(another) == another
        other.close()


@pytest.mark.parametrize("acknowledged", [True, False])
def test_an_empty_database_is_not_taken_for_that_of_a_run_that_was_acknowledged(
    acknowledged: bool, tmp_path: Path, postgresql_url: str
) -> None:
    """By a wrong name, a database that was made anew, or a role's search path no run begins again."""
    store = open_store(postgresql_url, tmp_path / "data")
    store.start(INFO)
    store.append([asked("t1")])
    mark = Mark(INFO.run_id, 1, "ab" * 32)
    if acknowledged:
        store.acknowledge(mark)
    store.close()
    with psycopg.connect(postgresql_url, autocommit=True) as admin:
        admin.execute("CREATE SCHEMA elsewhere")
        admin.execute(f"ALTER DATABASE {admin.info.dbname} SET search_path = elsewhere".encode())
    another = replace(INFO, run_id="another")
    other = open_store(postgresql_url, tmp_path / "data")
    if not acknowledged:  # of such a run nobody was told
        assert other.start(another) == another
        other.close()
        return
    for _ in range(2):
        with pytest.raises(
            LogLost, match=r"has no run, and .*acknowledged is of run run-1, .* event 1; .*search_path"
        ):
            other.start(another)
        assert other.info() is None
    with psycopg.connect(postgresql_url, autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {admin.info.dbname} RESET search_path".encode())
    again = open_store(postgresql_url, tmp_path / "data")
    assert (again.start(INFO), again.mark()) == (INFO, mark)
    again.close()


def test_a_log_that_ends_before_its_mark_says_how_to_go_on_without_what_is_lost(on_disk: Backend) -> None:
    """By a command that finds the run, be it in PostgreSQL."""
    store = on_disk.start()
    store.append([asked("t1")])
    store.acknowledge(Mark(INFO.run_id, 3, "ab" * 32))
    store.close()
    place = "" if on_disk.kind == "sqlite" else " --database URL"
    with pytest.raises(LogLost, match=f"2 events are lost.* with `anabranch admin attest-restore{place}`$"):
        on_disk.start()
