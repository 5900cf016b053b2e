"""SQLite's file is made smaller at a start where much of it is free, or is left as it is."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from stores import LIMITS

from anabranch.core.errors import StoreFull
from anabranch.core.limits import MIB
from anabranch.server.store.factory import open_store
from anabranch.server.store.shrinking import FREE_BYTES, NEW, _copy_alone, shrink
from anabranch.testing.store import INFO, asked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a run with two events."""
    store = open_store("", tmp_path / "data")
    store.start(INFO)
    store.append([asked("t1"), asked("t2")])
    store.close()
    return tmp_path / "data/anabranch.db"


def free(path: Path, free_bytes: int, kept_bytes: int = 0) -> None:
    """Put so much into the file and take it out again, and so much that stays."""
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        for name, size in (("gone", free_bytes), ("stays", kept_bytes)):
            file.execute(f"CREATE TABLE {name} (data BLOB)")
            file.execute(f"INSERT INTO {name} VALUES (zeroblob({size}))")
        file.execute("DROP TABLE gone")


def told(path: Path) -> list[str]:
    """All that SQLite can tell of the file."""
    with closing(sqlite3.connect(path)) as file:
        return list(file.iterdump())


def test_what_is_free_is_given_back_and_the_run_goes_on(path: Path) -> None:
    free(path, FREE_BYTES + MIB)
    before = told(path)
    shrink(path, 0)
    assert path.stat().st_size < MIB
    assert told(path) == before
    assert path.stat().st_mode & 0o077 == 0
    assert not path.with_name(f"{path.name}{NEW}").exists()
    store = open_store("", path.parent)
    store.start(INFO)
    assert store.append([asked("t3")]) == [3]
    store.close()


def test_a_server_that_held_too_much_takes_updates_again(path: Path) -> None:
    """As after a start with `server.keep`, which has dropped what was old: the file was counted for ever."""
    free(path, FREE_BYTES + MIB)
    store = open_store("", path.parent, LIMITS, disk_bytes_max=FREE_BYTES // 2)
    store.start(INFO)
    assert store.append([asked("t3")]) == [3]
    store.close()
    store = open_store("", path.parent, LIMITS, disk_bytes_max=MIB // 100)
    store.start(INFO)
    with pytest.raises(StoreFull, match="and once more when that has gone"):
        store.append([asked("t4")])
    store.close()


@pytest.mark.parametrize(
    ("free_bytes", "kept_bytes", "room_min"),
    [
        (FREE_BYTES - MIB, 0, 0),  # not much
        (FREE_BYTES + MIB, FREE_BYTES + 2 * MIB, 0),  # less than half
        (FREE_BYTES + MIB, 0, 1 << 60),  # no room for the copy
    ],
)
def test_where_it_is_not_worth_it_or_there_is_no_room_it_stays(
    path: Path, free_bytes: int, kept_bytes: int, room_min: int
) -> None:
    free(path, free_bytes, kept_bytes)
    before = path.stat()
    shrink(path, room_min)
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)


def test_a_file_that_somebody_reads_stays_as_it_is(path: Path) -> None:
    free(path, FREE_BYTES + MIB)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (2,)
        store = open_store("", path.parent)
        store.start(INFO)
        store.append([asked("t3")])
        store.append([])
        assert path.stat().st_size > FREE_BYTES
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (2,)
        reader.execute("COMMIT")
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (3,)
        store.close()


def test_who_begins_to_read_while_it_is_replaced_reads_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for the lock of a copy under way has the old file open when it gets it."""
    new = path.with_name("new")
    with closing(sqlite3.connect(path)) as file, closing(sqlite3.connect(new)) as copy:
        file.backup(copy)
        copy.execute("UPDATE runs SET name = 'the new one'")
        copy.commit()
    connect = sqlite3.connect

    def replaced(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        found: sqlite3.Connection = connect(*args, **kwargs)
        if new.exists():
            new.rename(path)
        return found

    monkeypatch.setattr(sqlite3, "connect", replaced)
    store = open_store("", path.parent)
    assert (info := store.info()) is not None
    assert info.name == "the new one"
    store.close()


def test_a_copy_under_way_keeps_readers_out_from_its_first_step(path: Path) -> None:
    free(path, FREE_BYTES + MIB)
    steps = []

    class Watched(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            found = super().execute(sql, *args)
            found.fetchall()  # until then it has its lock anyhow
            if "=" in sql:
                with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=0)) as reader:
                    try:
                        reader.execute("SELECT * FROM runs").fetchone()
                    except sqlite3.OperationalError:
                        steps.append(sql)
            return found

    with closing(sqlite3.connect(path, isolation_level=None, factory=Watched)) as file:
        _copy_alone(file, path.with_name("copy"))
    assert steps == ["PRAGMA journal_mode=DELETE"]


def test_what_one_that_was_killed_has_left_goes(path: Path) -> None:
    left = path.with_name(f"{path.name}{NEW}")
    left.write_bytes(b"half of it")
    shrink(path, 0)
    assert not left.exists()


def test_a_link_in_its_place_is_left_to_whoever_opens_it(path: Path, tmp_path: Path) -> None:
    """That is an error there; the file that it names is another disk's, perhaps."""
    free(path, FREE_BYTES + MIB)
    elsewhere = path.rename(tmp_path / "elsewhere.db")
    path.symlink_to(elsewhere)
    shrink(path, 0)
    assert path.is_symlink()
    assert elsewhere.stat().st_size > FREE_BYTES
