"""What a snapshot names on a store's shelf is there after a restart; a store that servers share has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stores import INFO, LIMITS, Backend, enrolled, snapshot
from wire import server_config

from anabranch.core.engine.shelf import Shelved, rows_named
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import dense
from anabranch.core.snapshot import Snapshot
from anabranch.server import failpoints
from anabranch.server.manifest import write_manifest
from anabranch.server.recovery import recover
from anabranch.server.store.memory import MemoryStore
from anabranch.server.store.sql import SqlStore
from anabranch.support.shelf import RowShelf

Kept = MemoryStore | SqlStore


@pytest.fixture(params=["memory", "sqlite"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    kept = MemoryStore(LIMITS) if request.param == "memory" else None
    return Backend(request.param, "", tmp_path / "data", kept)


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
    store.append([enrolled(), *(enrolled(f"c{n}") for n in range(4))])
    names = []
    for number in range(5):
        row = put(shelf, number)
        names.append(row.sha256)
        store.save_snapshot(naming(number, row), number + 1, 5.0 + number)
        del row
        put(shelf, 100)  # what has gone is seen to with the next call
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
    store.close()
    shelf.rows.remove([second.sha256])
    store, shelf = opened(backend)
    assert store.load().applied_through_seq == 1
    store.close()
    shelf.rows.remove([first.sha256])
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


def test_on_postgresql_a_run_is_refused_before_it_is_entered(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """So the same run begins with what the error says."""
    backend = Backend("postgresql", request.getfixturevalue("postgresql_url"), tmp_path / "data")
    manifest = write_manifest(tmp_path / "model", "test", {"w": np.zeros(4, np.float32)}, ())
    store = backend.open()
    config = server_config(backend.folder, strategy={"name": "ace", "memory": "disk"})
    with pytest.raises(ConfigError, match=r"needs a store that has a shelf.*or set memory = 'ram'"):
        recover(store, config, manifest, LIMITS)
    assert store.info() is None
    config = server_config(backend.folder, strategy={"name": "ace", "memory": "ram"})
    assert recover(store, config, manifest, LIMITS).engine.version == 0
    assert store.info() != INFO
    store.close()
