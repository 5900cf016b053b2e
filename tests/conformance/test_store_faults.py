"""Full disks, cut connections, kills, second writers: what a store does when things go wrong."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text
from stores import LIMITS, Backend

from anabranch.core.errors import ConfigError, StoreCorrupt, StoreError, StoreFull, StoreLocked, outcome_of
from anabranch.server.store import sqlite
from anabranch.server.store.base import DiskFailed, Entry, Store
from anabranch.server.store.factory import open_store
from anabranch.server.store.sql import SqlStore
from anabranch.server.store.sqlite_store import SqliteStore
from anabranch.testing.store import INFO, History, logged, mask_sum, reference, snapshot, update, upload

# --- faults ----------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_log_as_it_was(backend: Backend) -> None:
    store = backend.start()
    store.append([update(1)])
    store.close()
    full = backend.open(replace(LIMITS, free_disk_bytes_min=0))
    full.start(INFO)
    _fill(backend, full, True)
    assert full.append([]) == [], "there is nothing to write"
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


def test_a_store_that_cannot_let_go_of_one_file_lets_go_of_its_folder(tmp_path: Path) -> None:
    """Who has it opened is the same process: a server of jobs begins a job that has failed anew."""
    store = open_store("", tmp_path, LIMITS)
    store.start(INFO)
    store.append([update(1)])
    files = {link.resolve(): int(link.name) for link in Path("/proc/self/fd").iterdir()}
    (segment,) = (tmp_path / "log").iterdir()
    os.close(files[segment])
    with pytest.raises(OSError, match="Bad file descriptor"):
        store.close()
    again = open_store("", tmp_path, LIMITS)
    again.start(INFO)
    assert len(logged(again)) == 1
    again.close()


def test_a_store_below_the_watermark_does_not_start(on_disk: Backend) -> None:
    store = on_disk.open(replace(LIMITS, free_disk_bytes_min=1 << 60))
    with pytest.raises(StoreFull, match=r"watermark.* start the server again$"):
        store.start(INFO)


def test_two_writers_are_one_too_many(on_disk: Backend) -> None:
    first = on_disk.start()
    mine = f"in use by process {os.getpid()} on {re.escape(platform.node())}: stop it"
    with pytest.raises(StoreLocked, match=mine):  # in containers everybody is process 1
        on_disk.start()
    assert first.append([update(1)]) == [1]
    reader = on_disk.open()  # looking is free
    assert len(logged(reader)) == 1
    reader.close()
    first.close()
    on_disk.start().close()


@pytest.mark.parametrize("how", ["exchanged", "moved", "unlocked"])
def test_a_folder_that_is_not_the_locked_one_any_more_is_left_alone(on_disk: Backend, how: str) -> None:
    """Open files go with a folder that is moved, and names lead to another: a backup put back, say."""
    store = on_disk.start()
    store.append([update(1)])
    for version in range(1, 4):
        store.save_snapshot(snapshot(version), 1, float(version))
    if how == "unlocked":
        (on_disk.folder / "lock").unlink()
        on_disk.open().close()
    else:
        moved = on_disk.folder.rename(on_disk.folder.with_name("moved"))
        if how == "exchanged":
            shutil.copytree(moved, on_disk.folder)
    before = sorted(on_disk.folder.rglob("*"))
    for write in (
        lambda: store.append([update(2)]),
        lambda: store.write_snapshot(snapshot(4)),
        lambda: store.save_snapshot(snapshot(4), 1, 4.0, written="0" * 64),
    ):
        with pytest.raises(DiskFailed, match=r"lock is not what this server has locked.*never delete"):
            write()
    assert sorted(on_disk.folder.rglob("*")) == before
    store.close()


def test_a_database_of_a_killed_server_where_nothing_can_be_written_says_what_helps(tmp_path: Path) -> None:
    """SQLite makes an index beside its log; here that cannot be opened, as its name leads nowhere."""
    store = open_store("", tmp_path / "data")
    store.start(INFO)
    killed = Path(shutil.copytree(tmp_path / "data", tmp_path / "killed"))
    assert (killed / "anabranch.db-wal").stat().st_size > 0
    (killed / "anabranch.db-shm").unlink()
    (killed / "anabranch.db-shm").symlink_to("anabranch.db-shm")
    with pytest.raises(StoreError, match=r"unable to open .*; if its folder cannot be written to, copy that"):
        open_store("", killed).info()
    store.close()


class Letting(logging.Handler):
    """Lets go of a lock as soon as the log says that somebody waits for it."""

    def __init__(self, holder: sqlite3.Connection) -> None:
        super().__init__()
        self.said: list[str] = []
        self._holder = holder

    def emit(self, record: logging.LogRecord) -> None:
        """Each line."""
        self.said.append(record.getMessage())
        self._holder.rollback()


def test_another_process_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 50)
    store = open_store("", tmp_path, LIMITS)
    store.start(INFO)
    holder = sqlite3.connect(tmp_path / "anabranch.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    letting = Letting(holder)
    sqlite.log.addHandler(letting)
    try:
        assert store.append([update(1)]) == [1]
        store.append([])  # the rows wait for it, the log does not
    finally:
        sqlite.log.removeHandler(letting)
    (said,) = letting.said
    assert "another process has locked sqlite:///" in said
    holder.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(sqlite, "LOCKED_S_MAX", 0.2)
    assert store.append([update(2)]) == [2]
    with pytest.raises(StoreLocked, match="another process writes there: stop it") as raised:
        store.append([])
    assert outcome_of(raised.value).exit_code == 33
    holder.close()
    assert store.append([update(2), update(3)]) == [None, 3]
    store.close()


def test_a_database_that_is_damaged_at_work_is_named_when_it_is_let_go(tmp_path: Path) -> None:
    """SQLite finds it at the beginning of a transaction, which is not an `OperationalError`."""
    store = open_store("", tmp_path, LIMITS)
    store.start(INFO)
    store.append([update(1)])
    path = tmp_path / "anabranch.db"
    with sqlite3.connect(path) as other:  # the store looks at the file again after it
        other.execute("PRAGMA user_version = 7")
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    other.close()
    with path.open("r+b") as file:
        file.write(bytes(100))
    with pytest.raises(StoreCorrupt, match="admin rebuild"):
        store.append([])
    store.close()


def test_a_name_of_other_times_is_above_the_data_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of bytes that are no UTF-8."""
    above = tmp_path / os.fsdecode(b"gr\xfcn")
    above.mkdir()
    monkeypatch.chdir(above)
    store = open_store("", Path("data"), LIMITS)
    store.start(INFO)
    assert store.append([update(1)]) == [1]
    store.close()
    reader = open_store("", Path("data"), LIMITS)
    assert len(logged(reader)) == 1
    reader.close()
    with pytest.raises(ConfigError, match=r"server\.data_dir = .*gr.udcfcn/data' is no text in UTF-8"):
        open_store("", above / "data", LIMITS)


@pytest.mark.parametrize("below", ["", "run"])
def test_a_link_whose_disk_is_not_there_is_named_with_where_it_leads(below: str, tmp_path: Path) -> None:
    """Nothing on a disk is in doubt then, and nothing is made where the disk belongs."""
    disk, link = tmp_path / "disk", tmp_path / "link"
    link.symlink_to(disk)
    with pytest.raises(StoreError, match=rf"{link} is a link to {disk}, which is not there; check") as said:
        open_store("", link / below, LIMITS).start(INFO)
    assert not isinstance(said.value, DiskFailed)
    assert not disk.exists()
    disk.mkdir()
    store = open_store("", link / below, LIMITS)
    store.start(INFO)
    assert store.append([update(1)]) == [1]
    store.close()


def test_two_writers_with_one_database_are_too_many(postgresql_url: str, tmp_path: Path) -> None:
    first = open_store(postgresql_url, tmp_path / "one", LIMITS)
    second = open_store(postgresql_url, tmp_path / "two", LIMITS)
    first.start(INFO)
    with pytest.raises(StoreLocked, match="another process writes there"):
        second.start(INFO)
    first.close()
    second.start(INFO)
    second.close()


@pytest.mark.parametrize("way", ["ended by the server", "gone"])
def test_a_connection_that_is_cut_is_not_made_good_in_silence(
    way: str, postgresql_url: str, tmp_path: Path
) -> None:
    store = open_store(postgresql_url, tmp_path, LIMITS)
    assert isinstance(store, SqlStore)
    store.start(INFO)
    store.append([update(1)])
    with store._database.transaction() as connection:
        backend = connection.scalar(text("SELECT pg_backend_pid()"))
        raw = connection.connection.driver_connection
        assert isinstance(raw, psycopg.Connection)
    if way == "gone":  # its last word is three lines of libpq's
        with socket.socket(fileno=os.dup(raw.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)
    with psycopg.connect(postgresql_url, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", [backend])
    for _ in range(2):  # whoever has the lock may have written since: only a restart helps
        with pytest.raises(DiskFailed, match=r"\A.*restart to recover\Z"):
            store.append([update(2)])
    store.close()
    store.start(INFO)
    assert store.append([update(1), update(2)]) == [None, 2]
    store.close()


def test_a_failed_batch_leaves_nothing(on_disk: Backend, a_history: History) -> None:
    store = on_disk.start()
    broken = [update(1), Entry(update(2).record, b"not of the size it says")]
    with pytest.raises(StoreError):
        store.append(broken, a_history[1])
    assert logged(store) == []
    assert store.append([update(2)]) == [1]
    store.close()


def test_what_no_table_takes_is_not_in_the_log_either(on_disk: Backend) -> None:
    store = on_disk.start()
    store.append([update(1)])
    record = dict(update(2).record)
    record["payload"] = {**record["payload"], "size_bytes": 1 << 63}
    record["flaw"] = "too large"  # its payload need not be there
    with pytest.raises((StoreError, OverflowError)):
        store.append([Entry(record)])
    store.close()
    store = on_disk.start()
    assert store.append([update(2)]) == [2]
    store.close()


def test_a_database_that_is_full_says_so(on_disk: Backend) -> None:
    store = on_disk.start()
    assert isinstance(store, SqlStore)
    store.append([update(1)])
    with store._database.writing() as connection:
        for statement in FILL[on_disk.kind]:
            connection.execute(text(statement))
    many = [update(n) for n in range(2, 302)]
    if on_disk.kind == "sqlite":  # the log, a file beside it, has room: the rows wait
        assert store.append(many) == list(range(2, 302))
        assert store.append(many) == [None] * 300
        with pytest.raises(StoreFull):
            logged(store)
        with pytest.raises(StoreFull):
            store.append([])
    else:
        with pytest.raises(StoreFull):
            store.append(many)
        assert len(logged(store)) == 1
    with store._database.writing() as connection:
        for statement in EMPTY[on_disk.kind]:
            connection.execute(text(statement))
    known = [None] * 300 if on_disk.kind == "sqlite" else list(range(2, 302))
    assert store.append(many) == known
    assert [seq for seq, _ in store.records()] == list(range(1, 302))
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
    for _ in range(2):
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


# --- what is gone ----------------------------------------------------------------------------


def test_a_start_tells_which_files_of_payloads_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of those that rows name: an older segment, and a payload that is a file. What is there is not told."""
    store = open_store("", tmp_path, LIMITS)
    assert isinstance(store, SqliteStore)
    store.start(INFO)
    large = bytes(1000)
    sha256 = upload(store, large, "u3")
    for entry in (update(1), update(2), Entry(update(3, large).record), mask_sum(1, b"12345678")):
        store.append([entry])
        store._segments.close()  # each has a segment of its own
    store.close()
    caplog.clear()
    store.start(INFO)
    store.close()
    assert "is not there" not in caplog.text
    blob, segment = tmp_path / "blobs" / sha256[:2] / sha256, tmp_path / "log/000001.log"
    segment.unlink()
    blob.unlink()
    store.start(INFO)
    (said,) = [record for record in caplog.records if "is not there" in record.message]
    assert said.levelno == logging.WARNING
    assert said.message.startswith(f"{segment} is not there, nor are 1 others")
    assert bytes(store.payload(reference(update(2)))) == b"payload 2"
    with pytest.raises(StoreCorrupt, match=str(segment)):
        store.payload(reference(update(1)))
    store.close()
    (tmp_path / "log/000004.log").unlink()  # of the sum of a keeper
    caplog.clear()
    store.start(INFO)
    assert "000001.log is not there, nor are 2 others" in caplog.text
    store.close()
