"""What a snapshot names on a store's shelf is there after a restart, also of another server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psycopg
import pytest
from sqlalchemy import event
from stores import LIMITS, Backend
from wire import server_config

from anabranch.core.engine.shelf import Shelved, row_of, rows_named
from anabranch.core.errors import ConfigError, LeadershipLost, StoreCorrupt, StoreError
from anabranch.core.model.params import dense
from anabranch.core.snapshot import Snapshot
from anabranch.server import failpoints
from anabranch.server.manifest import write_manifest
from anabranch.server.recovery import recover
from anabranch.server.store import row_table
from anabranch.server.store.memory import MemoryStore
from anabranch.server.store.postgresql_store import PostgresqlStore
from anabranch.server.store.row_table import TableRows
from anabranch.server.store.sql import SqlStore
from anabranch.support.shelf import RowShelf
from anabranch.testing.store import enrolled, snapshot

Kept = MemoryStore | SqlStore


def opened(backend: Backend) -> tuple[Kept, RowShelf]:
    store = backend.start()
    assert isinstance(store, MemoryStore | SqlStore)
    assert store.shelf is not None
    return store, store.shelf


def naming(version: int, *rows: Shelved) -> Snapshot:
    """A snapshot of a state that has these rows."""
    made = snapshot(version)
    named = [{"$row": row.sha256, "size": row.size} for row in rows]
    return replace(made, meta={**made.meta, "strategy": named}, holds=rows)


def put(shelf: RowShelf, number: float) -> Shelved:
    return shelf.put(np.full(5, number, np.float32))


def saved_in_turn(store: Kept, shelf: RowShelf, count: int, *between: float) -> list[str]:
    """The names of rows of which each is in one snapshot alone; `between`: what is put after each."""
    store.append([enrolled(), *(enrolled(f"c{n}") for n in range(count - 1))])
    names = []
    for number in range(count):
        row = put(shelf, number)
        names.append(row.sha256)
        store.save_snapshot(naming(number, row), number + 1, 5.0 + number)
        del row
        for other in between:
            put(shelf, other)
    return names


def lose(shelf: RowShelf, row: Shelved) -> None:
    shelf.rows.remove([row.sha256])
    shelf.rows.flush([])


def test_what_a_snapshot_names_is_there_after_a_restart(backend: Backend) -> None:
    store, shelf = opened(backend)
    store.append([enrolled()])
    kept, lost = put(shelf, 1), put(shelf, 2)
    store.save_snapshot(naming(0, kept), 1, 5.0)
    store.close()
    store, shelf = opened(backend)
    found = store.load().snapshot
    assert found is not None
    assert list(rows_named(found.meta)) == [kept.sha256]
    assert np.array_equal(dense(shelf.take(shelf.named(kept.sha256, 5))), np.full(5, 1, np.float32))
    if backend.memory is None:  # there the reference of a killed engine is another process's
        assert lost.sha256 not in shelf.rows.names()
    assert store.problems() == []
    store.close()


def test_an_older_snapshot_finds_its_rows(backend: Backend) -> None:
    """Three are kept: the first one's row goes with it, when the fourth is named."""
    store, shelf = opened(backend)
    names = saved_in_turn(store, shelf, 5, 100)  # what has gone is seen to with the next call
    assert [name in shelf.rows.names() for name in names] == [False, False, True, True, True]
    assert store.problems() == []
    backend.damage("snapshot")
    store.close()
    store, shelf = opened(backend)
    found = store.load()
    assert found.snapshot is not None
    (name,) = rows_named(found.snapshot.meta)
    assert (name, found.applied_through_seq) == (names[3], 4)
    assert np.array_equal(dense(shelf.take(shelf.named(name, 5))), np.full(5, 3, np.float32))
    store.close()


def test_a_snapshot_whose_rows_are_lost_is_as_a_damaged_one(backend: Backend) -> None:
    store, shelf = opened(backend)
    store.append([enrolled(), enrolled("c2")])
    first, second = put(shelf, 1), put(shelf, 2)
    store.save_snapshot(naming(0, first), 1, 5.0)
    store.save_snapshot(naming(1, second), 2, 6.0)
    lose(shelf, second)
    store.close()
    store, shelf = opened(backend)
    assert store.load().applied_through_seq == 1
    lose(shelf, first)
    store.close()
    store, _ = opened(backend)
    assert (store.load().snapshot, store.load().applied_through_seq) == (None, 0)
    store.close()


@pytest.fixture
def reached() -> Iterator[list[str]]:
    names: list[str] = []
    failpoints.arm(names.append)
    yield names
    failpoints.arm(None)


def test_rows_are_flushed_before_the_snapshot_is_written(tmp_path: Path, reached: list[str]) -> None:
    """And those that go, go when the snapshot is named that needs them no more."""
    backend = Backend("sqlite", "", tmp_path / "data")
    store, shelf = opened(backend)
    store.append([enrolled(), *(enrolled(f"c{n}") for n in range(4))])
    reached.clear()
    for number in range(4):
        row = put(shelf, number)
        store.save_snapshot(naming(number, row), number + 1, 5.0)
        del row
    order = [name for name in reached if name.startswith(("shelf", "snapshot"))]
    each = ["shelf_written", "shelf_flushed", "snapshot_written", "snapshot_named", "snapshots_cleared"]
    assert order == [*each, *each, *each, *each[:-1], "shelf_cleared", *each[-1:]]
    store.close()


def test_verify_finds_damaged_rows(tmp_path: Path) -> None:
    backend = Backend("sqlite", "", tmp_path / "data")
    store, shelf = opened(backend)
    store.append([enrolled()])
    store.save_snapshot(naming(0, put(shelf, 1)), 1, 5.0)
    (path,) = [path for path in (backend.folder / "shelf").rglob("*") if path.is_file()]
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = store.problems()
    assert str(path) in problem
    store.close()


# --- in a database that servers share --------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path, postgresql_url: str) -> Backend:
    return Backend("postgresql", postgresql_url, tmp_path / "data")


def elsewhere(backend: Backend) -> Backend:
    """A server on another machine."""
    return replace(backend, folder=backend.folder.with_name("elsewhere"))


def _make_schema(backend: Backend, name: str) -> None:
    with psycopg.connect(backend.database, autocommit=True) as admin:
        admin.execute(f"CREATE SCHEMA {name}".encode())


def table(backend: Backend) -> list[str]:
    """The names of the rows that the database has, by its own program."""
    with psycopg.connect(backend.database) as admin:
        found = admin.execute(b"SELECT to_regclass('shelf_rows')").fetchone()
        if found == (None,):
            return []
        return [name for (name,) in admin.execute(b"SELECT DISTINCT sha256 FROM shelf_rows ORDER BY 1")]


def test_whoever_leads_next_has_what_a_snapshot_names(shared: Backend) -> None:
    """On its own disk there is nothing, and it reads what the old leader wrote."""
    store, shelf = opened(shared)
    store.append([enrolled()])
    large = shelf.put(np.arange(600_000, dtype=np.float32))  # of several pieces
    store.save_snapshot(naming(0, large), 1, 5.0)
    store.close()
    assert not (shared.folder / "shelf").exists()
    store, shelf = opened(elsewhere(shared))
    found = store.load().snapshot
    assert found is not None
    (name,) = rows_named(found.meta)
    assert np.array_equal(dense(shelf.take(shelf.named(name, 600_000))), np.arange(600_000))
    assert store.problems() == []
    store.close()


def test_data_of_a_run_that_puts_nothing_there_are_as_before(shared: Backend) -> None:
    store, _ = opened(shared)
    store.append([enrolled()])
    store.save_snapshot(snapshot(0), 1, 5.0)
    assert store.problems() == []
    store.close()
    store, _ = opened(shared)
    assert store.load().applied_through_seq == 1
    store.close()
    with psycopg.connect(shared.database) as admin:
        assert admin.execute(b"SELECT to_regclass('shelf_rows')").fetchone() == (None,)


def test_a_row_that_is_replaced_before_a_snapshot_is_never_written(shared: Backend) -> None:
    store, shelf = opened(shared)
    store.append([enrolled()])
    first = put(shelf, 1)
    kept = put(shelf, 2)
    assert np.array_equal(dense(shelf.take(first)), np.full(5, 1, np.float32))
    del first
    assert table(shared) == []
    store.save_snapshot(naming(0, kept), 1, 5.0)
    assert table(shared) == [kept.sha256]
    store.close()


def test_what_is_replaced_goes_with_the_next_snapshot(shared: Backend) -> None:
    store, shelf = opened(shared)
    names = saved_in_turn(store, shelf, 6)
    assert shelf.rows.names() == set(names[3:])
    assert table(shared) == sorted(names[2:])  # that of the third went when the sixth was named
    store.close()


def test_of_what_waits_only_so_much_is_in_memory(shared: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    store = shared.start()
    assert isinstance(store, PostgresqlStore)
    rows = TableRows(store._database, held_bytes_max=1_000)
    monkeypatch.setattr(row_table, "STATEMENT_BYTES", 800)
    shelf = RowShelf(rows)
    held = [shelf.put(np.full(100, number, np.float32)) for number in range(10)]  # 432 bytes each
    assert table(shared) == sorted(row.sha256 for row in held[:8])  # the oldest, two a statement
    for number, row in enumerate(held):
        assert np.array_equal(dense(shelf.take(row)), np.full(100, number, np.float32))
    gone = {row.sha256 for row in held[:9]}
    del held[:9], row
    shelf.flush()
    assert rows.names() == {held[0].sha256}
    assert table(shared) == [held[0].sha256]
    assert gone.isdisjoint(table(shared))
    store.close()


def test_a_row_that_comes_again_is_not_removed(shared: Backend) -> None:
    """It goes, and is put there once more before the database has heard of the first."""
    store, shelf = opened(shared)
    rows = shelf.rows
    row = put(shelf, 1)
    shelf.flush()
    rows.remove([row.sha256])
    rows.write(row.sha256, row_of(np.full(5, 1, np.float32)))
    assert rows.flush([row.sha256]) == set()
    assert table(shared) == [row.sha256]
    assert np.array_equal(dense(shelf.take(row)), np.full(5, 1, np.float32))
    store.close()


def test_a_leader_of_before_removes_nothing(shared: Backend) -> None:
    """It was paused while another one came, for which the row is needed."""
    store, shelf = opened(shared)
    row = put(shelf, 1)
    shelf.flush()
    shelf.rows.remove([row.sha256])
    shared.behind("UPDATE leader SET epoch = epoch + 1")
    shelf.rows.flush([])
    assert table(shared) == [row.sha256]
    store.close()


def test_a_leader_of_before_writes_nothing(shared: Backend) -> None:
    store, shelf = opened(shared)
    shelf.put(np.zeros(5, np.float32))
    shelf.flush()
    before = table(shared)
    late = put(shelf, 1)
    shared.behind("UPDATE leader SET epoch = epoch + 1")
    with pytest.raises(LeadershipLost):
        shelf.flush()
    assert table(shared) == before
    assert late.sha256 in shelf.rows.names()  # it waits, and goes with this server
    store.close()


def test_a_table_that_another_server_makes_meanwhile_is_no_error(
    shared: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there at the look."""
    store, shelf = opened(shared)
    with psycopg.connect(shared.database, autocommit=True) as other:
        other.execute(b"CREATE TYPE shelf_rows AS ENUM ()")  # what it is seen by first
    row = put(shelf, 1)
    with pytest.raises(StoreError):  # there is none: that is said
        shelf.flush()
    with psycopg.connect(shared.database, autocommit=True) as other:
        other.execute(b"DROP TYPE shelf_rows")
    shelf.flush()
    assert table(shared) == [row.sha256]
    store.close()


def test_who_only_reads_finds_rows_and_changes_none(shared: Backend) -> None:
    store, shelf = opened(shared)
    row = put(shelf, 1)
    shelf.flush()
    reader = elsewhere(shared).open()
    assert isinstance(reader, SqlStore)
    assert reader.shelf.missing({row.sha256, "00" * 32}) == {"00" * 32}
    found = reader.shelf.named(row.sha256, 5)
    assert np.array_equal(dense(reader.shelf.take(found)), np.full(5, 1, np.float32))
    reader.shelf.rows.remove([row.sha256])
    with pytest.raises(StoreError, match="open for reading only"):
        reader.shelf.rows.flush([])
    reader.close()
    assert table(shared) == [row.sha256]
    store.close()


def test_a_row_that_is_lost_or_damaged_there_is_found(shared: Backend) -> None:
    store, shelf = opened(shared)
    store.append([enrolled()])
    row = put(shelf, 1)
    store.save_snapshot(naming(0, row), 1, 5.0)
    shared.behind("UPDATE shelf_rows SET data = set_byte(data, 40, get_byte(data, 40) # 1)")
    (problem,) = store.problems()
    assert f"row {row.sha256} of the table shelf_rows in postgresql" in problem
    assert "Delete it from the table shelf_rows, if it is there, and start again" in problem
    shared.behind("DELETE FROM shelf_rows")
    (problem,) = store.problems()
    assert "is not there" in problem
    assert store.load().snapshot is None
    shelf._unflushed.add(row.sha256)
    with pytest.raises(StoreCorrupt, match="is not there any more"):
        shelf.flush()
    store.close()


def test_no_server_waits_for_one_that_is_paused_while_it_writes_rows(
    shared: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each statement another server can write the same rows, and remove them."""
    monkeypatch.setattr(row_table, "STATEMENT_BYTES", 100)
    store, shelf = opened(shared)
    rows = shelf.rows
    assert isinstance(rows, TableRows)
    held = [put(shelf, number) for number in range(5)]
    written: list[int] = []

    def beside(connection: object, cursor: object, statement: str, *_: object) -> None:
        if "shelf_rows" in statement:
            with psycopg.connect(shared.database, autocommit=True) as other:
                other.execute(b"SET lock_timeout = '2s'")
                other.execute(b"CREATE TABLE IF NOT EXISTS shelf_rows (sha256 text)")
                found = other.execute(b"UPDATE shelf_rows SET data = data")
                written.append(found.rowcount)

    event.listen(rows._database._kept(), "after_cursor_execute", beside)
    shelf.flush()
    assert [n for n in written if n] == [
        2,
        4,
        5,
        5,
    ]  # two a statement, then a look
    assert table(shared) == sorted(row.sha256 for row in held)
    store.close()


def test_a_row_that_came_in_part_is_removed_by_the_next_start(
    shared: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written from its end, and the server was killed before it came to the beginning."""
    monkeypatch.setattr(row_table, "PIECE_BYTES", 100)
    monkeypatch.setattr(row_table, "STATEMENT_BYTES", 100)
    store, shelf = opened(shared)
    row = shelf.put(np.arange(200, dtype=np.float32))
    with psycopg.connect(shared.database, autocommit=True) as admin:
        admin.execute(b"CREATE TABLE shelf_rows (sha256 text, number int CHECK (number > 3), data bytea)")
        admin.execute(b"CREATE UNIQUE INDEX at ON shelf_rows (sha256, number)")
    with pytest.raises(StoreError):
        shelf.flush()
    assert table(shared) == [row.sha256]
    store.close()
    store, shelf = opened(shared)
    assert shelf.rows.names() == set()
    shelf.flush()
    assert table(shared) == []
    store.close()


def test_rows_of_another_run_in_the_same_database_are_left_alone(shared: Backend) -> None:
    """That run has a schema of its own, and this one's is found further on."""
    store, shelf = opened(shared)
    store.append([enrolled()])
    row = put(shelf, 1)
    store.save_snapshot(naming(0, row), 1, 5.0)
    _make_schema(shared, "own")
    own = replace(elsewhere(shared), database=f"{shared.database}&options=-csearch_path%3Down%2Cpublic")
    other, its = opened(own)
    other.append([enrolled()])
    other.save_snapshot(snapshot(0), 1, 5.0)
    assert its.rows.names() == set()
    its.flush()
    assert table(shared) == [row.sha256]
    mine = put(its, 2)
    its.flush()
    assert its.rows.names() == {mine.sha256}
    assert table(shared) == [row.sha256]
    assert store.problems() == []
    other.close()
    store.close()


def test_nobody_waits_while_a_snapshot_is_written(shared: Backend) -> None:
    """Until twice as much waits: then who writes is waited for."""
    store = shared.start()
    assert isinstance(store, PostgresqlStore)
    rows = TableRows(store._database, held_bytes_max=1_000)
    shelf = RowShelf(rows)
    with rows._changing:
        held = [shelf.put(np.full(100, number, np.float32)) for number in range(4)]  # 432 bytes each
    assert table(shared) == []
    held.append(shelf.put(np.full(100, 4, np.float32)))
    assert table(shared) == sorted(row.sha256 for row in held)
    store.close()


def test_a_connection_that_was_cut_while_it_idled_is_made_again(shared: Backend) -> None:
    store, shelf = opened(shared)
    row = put(shelf, 1)
    shelf.flush()
    shared.behind(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND pid NOT IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory')"
    )
    assert np.array_equal(dense(shelf.take(row)), np.full(5, 1, np.float32))
    store.close()


def test_a_store_of_ones_own_that_has_no_shelf_is_refused_before_the_run_is_entered(tmp_path: Path) -> None:
    """So the same run begins with what the error says."""
    manifest = write_manifest(tmp_path / "model", "test", {"w": np.zeros(4, np.float32)}, ())
    store = MemoryStore(LIMITS)
    del store.shelf
    config = server_config(tmp_path / "data", strategy={"name": "ace", "memory": "disk"})
    with pytest.raises(ConfigError, match=r"has a shelf.*PostgreSQL, or set memory = 'ram'"):
        recover(store, config, manifest, LIMITS)
    assert store.info() is None
