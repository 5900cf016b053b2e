"""The revisions lead to the tables of schema.py, on both databases, and back."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, inspect, make_url, text

from anabranch.core.content import BLAKE3
from anabranch.core.errors import StoreError, StoreNewer
from anabranch.server import backup
from anabranch.server.store.base import Entry, RunInfo
from anabranch.server.store.database import Database
from anabranch.server.store.factory import open_store
from anabranch.server.store.migrations import current_revision, downgrade, newest_revision, upgrade
from anabranch.server.store.postgresql import PostgresqlDatabase
from anabranch.server.store.revision import BROUGHT_UP, NEWEST, admit_blake3, bring_up, has_tables
from anabranch.server.store.schema import metadata
from anabranch.server.store.segments import Segments
from anabranch.server.store.sqlite import SqliteDatabase
from anabranch.testing.store import asked, enrolled, update

INFO = RunInfo("run-1", "n", {}, [], "ab" * 32, 0.0)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    made: Database
    if request.param == "sqlite":
        made = SqliteDatabase(tmp_path / "test.db")
    else:
        url = make_url(request.getfixturevalue("postgresql_url"))
        made = PostgresqlDatabase(url.set(drivername="postgresql+psycopg"))
    made.open(writes=True)
    yield made
    made.close()


def _shape(connection: Connection, tables: tuple[str, ...] = ()) -> dict[str, object]:
    """All that the database tells of these tables, else of ours: check constraints and indices with it."""
    look = inspect(connection)
    ours = [table for table in look.get_table_names() if table != "alembic_version"]
    return {
        table: {
            "columns": [
                (c["name"], repr(c["type"]), c["nullable"], c["default"]) for c in look.get_columns(table)
            ],
            "key": look.get_pk_constraint(table),
            "foreign": look.get_foreign_keys(table),
            "checks": sorted((str(c["name"]), c["sqltext"]) for c in look.get_check_constraints(table)),
            "indices": sorted(
                (str(i["name"]), i["column_names"], bool(i["unique"])) for i in look.get_indexes(table)
            ),
        }
        for table in sorted(tables or ours)
    }


def test_the_revisions_make_the_tables_of_the_schema(database: Database) -> None:
    with database.writing() as connection:
        metadata.create_all(connection)
        wanted = _shape(connection)
        metadata.drop_all(connection)
    with database.writing() as connection:
        assert current_revision(connection) is None
        upgrade(connection)
        assert current_revision(connection) == newest_revision()
        assert _shape(connection) == wanted
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        upgrade(connection)  # nothing left to do
        assert _shape(connection) == wanted


def test_a_start_finds_the_newest_tables_or_makes_them(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "anabranch.server.store.revision")
    with database.writing() as connection:
        assert not has_tables(connection)
        upgrade(connection, "0003")
        assert has_tables(connection)
        bring_up(connection)
        (said,) = caplog.messages
        assert said.startswith(
            f"the database was of revision 0003 and is of {BROUGHT_UP} now: an older release"
        )
        assert current_revision(connection) == BROUGHT_UP
        found = _shape(connection)
        bring_up(connection)
        assert caplog.messages == [said]
        assert has_tables(connection)
        assert _shape(connection) == found


def test_a_new_database_has_what_all_revisions_make(database: Database) -> None:
    with database.writing() as connection:
        upgrade(connection)
        wanted = _shape(connection), _shape(connection, ("alembic_version",))
        downgrade(connection, "base")
        connection.execute(text("DROP TABLE alembic_version"))
    with database.writing() as connection:
        bring_up(connection)
        assert (_shape(connection), _shape(connection, ("alembic_version",))) == wanted
        assert current_revision(connection) == BROUGHT_UP
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_the_first_start_needs_no_alembic(tmp_path: Path) -> None:
    """It takes a tenth of a second to load, and as long to carry out every revision."""
    code = f"""
import sys
from pathlib import Path
from anabranch.server.store.revision import bring_up, has_tables
from anabranch.server.store.sqlite import SqliteDatabase
made = SqliteDatabase(Path("{tmp_path}/test.db"))
made.open(writes=True)
with made.writing() as connection:
    assert not has_tables(connection)
    bring_up(connection)
    assert has_tables(connection)
made.close()
print("alembic" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_a_table_of_others_is_not_taken_for_ours(database: Database) -> None:
    with database.writing() as connection:
        connection.execute(text("CREATE TABLE events (mine INTEGER)"))
    with pytest.raises(StoreError, match="events"), database.writing() as connection:
        bring_up(connection)
    with database.writing() as connection:
        assert list(_shape(connection)) == ["events"]


@pytest.mark.parametrize("began", [None, "0003", BROUGHT_UP])
def test_data_with_a_payload_by_blake3_are_of_the_newest_revision(
    database: Database, began: str | None
) -> None:
    assert newest_revision() == NEWEST
    with database.writing() as connection:
        if began is not None:
            upgrade(connection, began)
        bring_up(connection)
        found = _shape(connection)
        for _ in range(2):
            admit_blake3(connection)
            assert has_tables(connection)
            bring_up(connection)
            assert (current_revision(connection), _shape(connection)) == (NEWEST, found)


def test_the_way_back_leaves_nothing(database: Database) -> None:
    with database.writing() as connection:
        upgrade(connection)
        downgrade(connection, "base")
        assert _shape(connection) == {}
        assert current_revision(connection) is None
        upgrade(connection)


def test_a_cut_upgrade_leaves_nothing(database: Database) -> None:
    with suppress(KeyboardInterrupt), database.writing() as connection:
        upgrade(connection)
        raise KeyboardInterrupt
    with database.writing() as connection:
        assert _shape(connection) == {}


def test_a_newer_database_is_refused(database: Database) -> None:
    with database.writing() as connection:
        upgrade(connection)
        connection.execute(text("UPDATE alembic_version SET version_num = 'f00d'"))
    with pytest.raises(StoreNewer, match="'f00d'"), database.writing() as connection:
        upgrade(connection)


def test_data_of_before_the_log_go_on_and_are_no_older_programs_any_more(tmp_path: Path) -> None:
    """That one would begin where the rows end, and number other events as the log has numbered its own."""
    raw = SqliteDatabase(tmp_path / "anabranch.db")
    raw.open(writes=True)
    with raw.writing() as connection:
        upgrade(connection, "0007")
    raw.close()
    store = open_store("", tmp_path)
    store.start(INFO)
    assert store.append([Entry({"kind": "ticked", "now": 1.0})]) == [1]
    store.close()
    raw.open(writes=True)
    with raw.writing() as connection:
        assert current_revision(connection) == BROUGHT_UP
    raw.close()


def test_a_store_of_a_newer_database_does_not_start(tmp_path: Path) -> None:
    store = open_store("", tmp_path)
    store.start(INFO)
    store.close()
    raw = SqliteDatabase(tmp_path / "anabranch.db")
    raw.open(writes=True)
    with raw.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'f00d'"))
    raw.close()
    for _ in range(2):  # the refusal let go of the lock
        with pytest.raises(StoreNewer, match="upgrade anabranch"):
            store.start(INFO)
    with pytest.raises(StoreNewer):
        store.info()
    store.close()


@pytest.mark.parametrize("url", ["sqlite", "postgresql"])
def test_the_first_payload_by_blake3_marks_the_data(
    url: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A program that knows of no such digest says that they are a newer one's, not damaged."""
    address = "" if url == "sqlite" else request.getfixturevalue("postgresql_url")
    before: Database = SqliteDatabase(tmp_path / "anabranch.db")
    if address:
        before = PostgresqlDatabase(make_url(address).set(drivername="postgresql+psycopg"))

    def known() -> str | None:
        with before.transaction() as connection:
            return current_revision(connection)

    entries = [enrolled(), asked("t1"), update(1)]
    for others, revision in ((entries, BROUGHT_UP), ([asked("t2"), update(2, algorithm=BLAKE3)], NEWEST)):
        store = open_store(address, tmp_path, lease_s=0.1)
        store.start(INFO)
        assert all(seq is not None for seq in store.append(others))
        assert known() == revision
        assert store.append([asked(f"more-{revision}")]) != [None]
        store.close()
        assert known() == revision
    before.close()
    store = open_store(address, tmp_path, lease_s=0.1)
    assert store.info() == INFO
    assert store.problems() == []
    store.close()


def revision_in(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "anabranch.db")) as database:
        ((found,),) = database.execute("SELECT version_num FROM alembic_version").fetchall()
    return str(found)


def test_the_data_are_marked_before_the_log_has_the_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, append = [], Segments.append

    def looked(log: Segments, first: int, events: Any) -> Any:
        found.append(revision_in(tmp_path))
        return append(log, first, events)

    monkeypatch.setattr(Segments, "append", looked)
    store = open_store("", tmp_path)
    store.start(INFO)
    store.append([enrolled(), asked("t1"), update(1)])
    store.append([asked("t2"), update(2, algorithm=BLAKE3)])
    store.close()
    assert found == [BROUGHT_UP, NEWEST]


def test_a_copy_is_marked_whose_log_came_after_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "data", tmp_path / "copy"
    store = open_store("", source)
    store.start(INFO)
    store.append([enrolled(), asked("t1"), update(1)])
    copied = backup._Copying._database

    def then(copying: Any) -> None:
        copied(copying)
        store.append([asked("t2"), update(2, algorithm=BLAKE3)])

    monkeypatch.setattr(backup._Copying, "_database", then)
    backup.back_up(source, target, proved=False)
    store.close()
    assert revision_in(target) == NEWEST


def test_a_start_marks_what_was_not(tmp_path: Path) -> None:
    """Rows of a log that it finds, and those of data of before there was a mark."""
    store = open_store("", tmp_path)
    store.start(INFO)
    store.append([enrolled(), asked("t1"), update(1), asked("t2"), update(2, algorithm=BLAKE3)])
    (copy := tmp_path / "killed").mkdir()
    for path in tmp_path.iterdir():  # as a kill leaves it: the rows are not written
        if path != copy:
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, copy / path.name)
    store.close()
    for folder in (copy, tmp_path):
        with closing(sqlite3.connect(folder / "anabranch.db")) as database, database:
            database.execute("UPDATE alembic_version SET version_num = ?", (BROUGHT_UP,))
        store = open_store("", folder)
        store.start(INFO)
        store.close()
        assert revision_in(folder) == NEWEST
