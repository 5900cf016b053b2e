"""A shelf: what was put there comes back to the bit; a row goes when nobody can ask for it, not before."""

from __future__ import annotations

import copy
import errno
import gc
import hashlib
import os
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anabranch.core.engine.shelf import Shelved, row_of, rows_named
from anabranch.core.errors import StoreCorrupt, StoreError, StoreFull
from anabranch.core.model.params import Delta, SparseVector, Vector, dense
from anabranch.server.store.base import DiskFailed
from anabranch.server.store.factory import open_store
from anabranch.server.store.shelf import StoredRows
from anabranch.server.store.sql import SqlStore
from anabranch.support.shelf import FolderRows, MemoryRows, Pieces, RowPlace, RowShelf, ScratchShelf
from anabranch.testing.store import INFO


def vector(number: float) -> Vector:
    return np.full(3, number, np.float32)


def numbers(shelf: RowShelf, row: Shelved) -> Vector:
    return dense(shelf.take(row))


def name_of(delta: Vector) -> str:
    """The name of a dense row, by the format alone."""
    head = struct.pack("<8s8sQQ", b"densrow1", delta.dtype.str.encode(), delta.size, delta.size)
    return hashlib.sha256(head + delta.tobytes()).hexdigest()


KINDS = ["memory", "folder", "stored", "table"]


@pytest.fixture(params=KINDS)
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RowPlace]:
    match request.param:
        case "memory":
            yield MemoryRows()
        case "folder":
            yield FolderRows(tmp_path / "shelf")
        case "stored":
            yield StoredRows(tmp_path, 0)
        case _:
            store = open_store(request.getfixturevalue("postgresql_url"), tmp_path)
            assert isinstance(store, SqlStore)
            store.start(INFO)
            yield store.shelf.rows
            store.close()


# --- what is there ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "delta",
    [
        np.array([1.5, -0.0, np.float32(1e-45)], np.float32),
        np.array([0.1, -1e300], np.float64),
        np.empty(0, np.float32),
        np.arange(6, dtype=np.float32)[::2],
        np.array([1, 2], ">f4"),
        SparseVector(np.array([5, 1]), np.array([2.5, -1], np.float32), 7),
        SparseVector(np.empty(0, np.int64), np.empty(0, np.float32), 7),
    ],
    ids=["f4", "f8", "empty", "strided", "big-endian", "sparse", "of nothing"],
)
def test_what_was_put_there_comes_back_to_the_bit(rows: RowPlace, delta: Delta) -> None:
    shelf = RowShelf(rows)
    row = shelf.put(delta)
    found = shelf.take(row)
    assert row.size == found.size == delta.size
    if isinstance(delta, SparseVector):
        assert isinstance(found, SparseVector)
        assert found.indices.dtype == np.int64
        assert found.indices.tolist() == delta.indices.tolist()
        found, delta = found.values, delta.values
    assert isinstance(found, np.ndarray)
    assert found.dtype == delta.dtype.newbyteorder("=")
    assert found.tobytes() == delta.astype(found.dtype).tobytes()


def test_a_row_is_named_by_its_bytes(rows: RowPlace) -> None:
    shelf = RowShelf(rows)
    delta = np.array([1.5, -2], np.float32)
    row = shelf.put(delta)
    assert row.sha256 == name_of(delta)
    assert shelf.put(delta.copy()) is row
    assert copy.deepcopy({"a": [row]})["a"][0] is row
    assert hashlib.sha256(rows.read(row.sha256)).hexdigest() == row.sha256
    assert rows.names() == {row.sha256}
    assert shelf.put(delta.astype(np.float64)) is not row


def test_a_damaged_row_says_what_to_do(rows: RowPlace) -> None:
    shelf = RowShelf(rows)
    row = shelf.put(vector(1))
    rows.write(row.sha256, [*row_of(vector(1))[:1], b"other bytes!"])
    remedy = "(Remove that file|Delete it from the table shelf_rows), if it is there, and start again"
    with pytest.raises(StoreCorrupt, match=f"{row.sha256}.*{remedy}"):
        shelf.take(row)
    rows.remove([row.sha256])
    rows.flush([])
    with pytest.raises(StoreCorrupt, match=f"{row.sha256}.*is lost. {remedy}"):
        shelf.take(row)


def test_a_row_that_was_cut_off_is_found(tmp_path: Path) -> None:
    rows = FolderRows(tmp_path)
    shelf = RowShelf(rows)
    row = shelf.put(vector(1))
    for length in (0, 3, 40):
        os.truncate(rows.path(row.sha256), length)
        with pytest.raises(StoreCorrupt, match="has the SHA-256"):
            shelf.take(row)


def test_the_rows_of_a_snapshot_are_found_in_its_json() -> None:
    plain = {"strategy": {"kept": {"a": {"delta": {"$row": "aa", "size": 1}, "base_version": 2}}}}
    nested = [plain, {"x": [1, None, "$row", {"$row": "bb", "size": 0}]}]
    assert list(rows_named(nested)) == ["aa", "bb"]


# --- what goes -------------------------------------------------------------------------------


def test_a_row_that_no_snapshot_can_name_goes_with_its_reference(rows: RowPlace) -> None:
    shelf = RowShelf(rows)
    row = shelf.put(vector(1))
    kept = shelf.put(vector(2))
    del row
    shelf.flush()
    assert rows.names() == {kept.sha256}


def test_a_row_that_a_snapshot_may_name_goes_with_the_last_one_that_can(rows: RowPlace) -> None:
    shelf = RowShelf(rows)
    row = shelf.put(vector(1))
    shelf.flush()
    shelf.retain([10])  # a snapshot of event 10 names it
    name = row.sha256
    del row
    shelf.retain([10, 20])
    assert rows.names() == {name}
    shelf.retain([20, 30])
    assert rows.names() == set()


def test_a_row_that_is_held_by_a_snapshot_on_its_way_stays(rows: RowPlace) -> None:
    """It was replaced while the file of the snapshot that names it was written."""
    shelf = RowShelf(rows)
    row = shelf.put(vector(1))
    holds, name = (row,), row.sha256
    del row
    shelf.flush()
    shelf.retain([10])
    assert rows.names() == {name}
    del holds
    shelf.retain([10, 20])
    assert rows.names() == {name}
    shelf.retain([20, 30])
    assert rows.names() == set()


def test_a_row_that_comes_again_stays(rows: RowPlace) -> None:
    """The same vector once more, when an old snapshot still names the row: it must outlive that one."""
    shelf = RowShelf(rows)
    row = shelf.put(vector(1))
    shelf.flush()
    shelf.retain([10])
    del row
    again = shelf.put(vector(1))
    shelf.retain([20, 30])
    assert rows.names() == {again.sha256}
    del again
    shelf.flush()
    shelf.retain([30, 31])
    assert rows.names() == {name_of(vector(1))}  # that of event 30 could name it
    shelf.retain([31, 32])
    assert rows.names() == set()


def test_a_row_of_a_kept_snapshot_is_not_taken_for_a_new_one(rows: RowPlace) -> None:
    """After a start it is put there again by the replay, and goes again: the old snapshot still names it."""
    before = RowShelf(rows)
    row = before.put(vector(1))
    before.flush()
    shelf = RowShelf(rows)
    shelf.begin({10: {row.sha256}})
    again = shelf.put(vector(1))
    del again
    shelf.flush()
    assert rows.names() == {row.sha256}
    shelf.retain([11, 20])
    assert rows.names() == set()


def test_a_lost_row_that_a_kept_snapshot_names_is_kept_when_a_replay_has_made_it(rows: RowPlace) -> None:
    shelf = RowShelf(rows)
    name = name_of(vector(1))
    shelf.begin({10: {name}})
    again = shelf.put(vector(1))
    del again
    shelf.flush()
    assert rows.names() == {name}
    shelf.retain([11, 20])
    assert rows.names() == set()


def test_a_start_clears_what_no_snapshot_names(rows: RowPlace) -> None:
    before = RowShelf(rows)
    named, other = before.put(vector(1)), before.put(vector(2))
    shelf = RowShelf(rows)
    shelf.begin({10: {named.sha256, "00" * 32}})
    assert rows.names() == {named.sha256}
    assert shelf.missing({named.sha256, other.sha256}) == {other.sha256}
    found = shelf.named(named.sha256, 3)
    assert np.array_equal(numbers(shelf, found), vector(1))
    shelf.retain([20, 30])
    assert rows.names() == {named.sha256}


def test_a_damaged_row_is_written_anew_by_the_replay(rows: RowPlace) -> None:
    before = RowShelf(rows)
    row = before.put(vector(1))
    before.flush()
    rows.write(row.sha256, [b"x" * 400])
    shelf = RowShelf(rows)
    shelf.begin({10: {row.sha256}})
    again = shelf.put(vector(1))
    assert np.array_equal(numbers(shelf, again), vector(1))


def test_what_lived_between_two_kept_snapshots_goes(rows: RowPlace) -> None:
    """The base of a log that drops its beginning is old, and stays."""
    shelf = RowShelf(rows)
    base = shelf.put(vector(0))
    shelf.flush()
    shelf.retain([10])
    name = base.sha256
    del base
    live = None
    for number in range(1, 40):
        live = shelf.put(vector(number))
        shelf.flush()
        shelf.retain([10, *[10 + n for n in range(max(1, number - 2), number + 1)]])
    assert live is not None
    assert rows.names() == {name, *(name_of(vector(number)) for number in (37, 38, 39))}


def test_a_start_knows_which_snapshots_name_what(rows: RowPlace) -> None:
    before = RowShelf(rows)
    held = [before.put(vector(number)) for number in range(3)]
    first, second, third = (row.sha256 for row in held)
    shelf = RowShelf(rows)
    shelf.begin({10: {first}, 20: {first, second}, 30: {third}})
    shelf.retain([10, 30, 40])
    assert rows.names() == {first, third}
    shelf.retain([30, 40])
    assert rows.names() == {third}


def test_a_reference_may_go_in_another_thread_at_any_moment(rows: RowPlace) -> None:
    """Here after `put` has seen to those that went, and before it looks for its own."""
    shelf = RowShelf(rows)
    held = [shelf.put(vector(1))]
    name = held[0].sha256
    shelf.flush()
    shelf.retain([10])
    settle = shelf._settle

    def settled() -> None:
        settle()
        held.clear()

    vars(shelf)["_settle"] = settled
    again = shelf.put(vector(1))
    vars(shelf).pop("_settle")
    del again
    shelf.flush()
    assert rows.names() == {name}


def test_a_reference_in_a_cycle_goes_with_the_collector(rows: RowPlace) -> None:
    """It may run in the middle of any call, this shelf's as well."""
    shelf = RowShelf(rows)
    cycle: list[object] = [shelf.put(vector(1))]
    cycle.append(cycle)
    del cycle
    gc.collect()
    shelf.flush()
    assert rows.names() == set()


# --- a full disk -----------------------------------------------------------------------------


class Full(MemoryRows):
    """RowPlace that have no room, as long as `is_full`."""

    is_full = True

    def write(self, sha256: str, row: Pieces) -> None:
        if self.is_full:
            raise StoreFull("no space left")
        super().write(sha256, row)


def test_on_a_full_disk_rows_wait_in_memory_and_snapshots_for_room() -> None:
    rows = Full()
    shelf = RowShelf(rows)
    row, gone = shelf.put(vector(1)), shelf.put(vector(2))
    assert np.array_equal(numbers(shelf, row), vector(1))
    del gone
    with pytest.raises(StoreFull):
        shelf.flush()
    rows.is_full = False
    shelf.flush()
    assert rows.names() == {row.sha256}
    assert np.array_equal(numbers(shelf, row), vector(1))


def test_a_write_for_which_there_is_no_room_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = StoredRows(tmp_path, 0)
    shelf = RowShelf(rows)
    held = shelf.put(vector(1))
    written: list[int] = []

    def pwrite(descriptor: int, data: memoryview, at: int) -> int:
        written.append(at)
        if at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data[:10])

    monkeypatch.setattr("anabranch.support.shelf.os.pwrite", pwrite)
    row = shelf.put(vector(2))
    assert written == [0, 10]
    assert rows.names() == {held.sha256}
    with pytest.raises(StoreFull, match="no space left on the disk; nothing acknowledged is lost"):
        shelf.flush()
    monkeypatch.undo()
    shelf.flush()
    assert rows.names() == {held.sha256, row.sha256}


def test_on_a_full_disk_the_row_of_a_kept_snapshot_is_not_forgotten() -> None:
    """The same vector comes again when there is no room, goes, and comes and goes when there is."""
    rows = Full()
    rows.is_full = False
    shelf = RowShelf(rows)
    row = shelf.put(vector(1))
    shelf.flush()
    shelf.retain([10])
    name = row.sha256
    del row
    rows.is_full = True
    again = shelf.put(vector(1))
    del again
    rows.is_full = False
    again = shelf.put(vector(1))
    del again
    shelf.flush()
    assert rows.names() == {name}
    shelf.retain([11, 12])
    assert rows.names() == set()


def test_a_flush_makes_files_durable_and_then_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = StoredRows(tmp_path, 0)
    shelf = RowShelf(rows)
    held = [shelf.put(vector(number)) for number in range(20)]
    going = shelf.put(vector(100))
    synced: list[Path] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    del going
    monkeypatch.setattr("os.fsync", noted)
    shelf.flush()
    files = {rows.path(row.sha256) for row in held}
    assert set(synced[:20]) == files
    assert set(synced[20:]) == {path.parent for path in files}
    synced.clear()
    shelf.flush()
    assert synced == []


def test_a_row_that_somebody_removed_is_noticed_at_the_flush(tmp_path: Path) -> None:
    rows = StoredRows(tmp_path, 0)
    shelf = RowShelf(rows)
    row = shelf.put(vector(1))
    rows.path(row.sha256).unlink()
    with pytest.raises(StoreCorrupt, match=f"{row.sha256} is not there any more"):
        shelf.flush()


def test_where_the_log_cannot_make_it_again_a_backup_is_asked_for(tmp_path: Path) -> None:
    late = False
    rows = StoredRows(tmp_path, 0, lambda: late)
    shelf = RowShelf(rows)
    row = shelf.put(vector(1))
    os.truncate(rows.path(row.sha256), 3)
    with pytest.raises(StoreCorrupt, match="Remove that file"):
        shelf.take(row)
    late = True
    with pytest.raises(StoreCorrupt, match=r"Restore a backup.*Leave the file where it is"):
        shelf.take(row)


def test_where_not_all_snapshots_could_be_read_nothing_is_cleared(rows: RowPlace) -> None:
    before = RowShelf(rows)
    named, other = before.put(vector(1)), before.put(vector(2))
    RowShelf(rows).begin({10: {named.sha256}}, clears=False)
    assert rows.names() == {named.sha256, other.sha256}


def test_a_flush_that_fails_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of room too: the system forgets what it could not write, and nobody has the bytes any more."""
    shelf = RowShelf(StoredRows(tmp_path, 0))
    row = shelf.put(vector(1))

    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("anabranch.server.store.shelf.os.fsync", fsync)
    for _ in range(2):
        with pytest.raises(DiskFailed, match="restart to recover"):
            shelf.flush()
    monkeypatch.undo()
    shelf.flush()
    assert np.array_equal(numbers(shelf, row), vector(1))


def test_under_the_watermark_nothing_is_written(tmp_path: Path) -> None:
    shelf = RowShelf(StoredRows(tmp_path, 1 << 62))
    row = shelf.put(vector(1))
    assert np.array_equal(numbers(shelf, row), vector(1))
    with pytest.raises(StoreFull, match="free_disk_bytes_min"):
        shelf.flush()


def test_a_link_in_the_place_of_a_row_is_not_followed(tmp_path: Path) -> None:
    rows = FolderRows(tmp_path / "shelf")
    name = name_of(vector(1))
    target = tmp_path / "target"
    rows.path(name).parent.mkdir(parents=True)
    rows.path(name).symlink_to(target)
    with pytest.raises(StoreError):
        RowShelf(rows).put(vector(1))
    assert not target.exists()


# --- one that goes with its process ----------------------------------------------------------


def test_a_scratch_shelf_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shelf = ScratchShelf()
    assert list(tmp_path.iterdir()) == []
    rows = [shelf.put(vector(n)) for n in range(3)]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3
    rows.pop()
    rows.append(shelf.put(vector(7)))
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3
    del shelf, rows
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_scratch_shelf_reads_a_servers_and_writes_nothing_there(tmp_path: Path) -> None:
    stored = StoredRows(tmp_path, 0)
    server = RowShelf(stored)
    row = server.put(vector(1))
    shelf = ScratchShelf(RowShelf(stored))
    seen = shelf.named(row.sha256, 3)
    assert np.array_equal(numbers(shelf, seen), vector(1))
    again, mine = shelf.put(vector(1)), shelf.put(vector(2))
    assert again is seen
    assert stored.names() == {row.sha256}
    stored.remove([row.sha256])  # the server goes on
    assert np.array_equal(numbers(shelf, again), vector(1))
    assert np.array_equal(numbers(shelf, mine), vector(2))
    assert stored.names() == set()


# --- any life --------------------------------------------------------------------------------

VALUES = st.integers(0, 5)


class Disk(MemoryRows):
    """Rows of which a power cut leaves what was flushed; it may have no room."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: set[str] = set()
        self.is_full = False

    def write(self, sha256: str, row: Pieces) -> None:
        if self.is_full:
            raise StoreFull("no space left")
        if self.data.get(sha256) != b"".join(row):
            self.flushed.discard(sha256)
        super().write(sha256, row)

    def flush(self, names: Collection[str]) -> set[str]:
        self.flushed |= self.data.keys() & names
        return super().flush(names)

    def remove(self, names: Iterable[str]) -> None:
        names = list(names)
        self.flushed.difference_update(names)
        super().remove(names)


class Life(RuleBasedStateMachine):
    """A state of four devices, snapshots of it, starts after kills and power cuts; the oracle has values."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Disk()
        self.shelf = RowShelf(self.rows)
        self.state: dict[str, Shelved] = {}
        self.values: dict[str, int] = {}
        self.event = 0
        self.snapshots: list[tuple[int, dict[str, int]]] = []
        self.pending: tuple[int, dict[str, int], tuple[Shelved, ...]] | None = None

    @rule(client=st.sampled_from("abcd"), value=VALUES)
    def remember(self, client: str, value: int) -> None:
        self.event += 1
        self.state = {**self.state, client: self.shelf.put(vector(value))}
        self.values = {**self.values, client: value}

    @rule(client=st.sampled_from("abcd"))
    def forget(self, client: str) -> None:
        self.event += 1
        self.state = {c: row for c, row in self.state.items() if c != client}
        self.values = {c: value for c, value in self.values.items() if c != client}

    @precondition(lambda self: self.pending is None)
    @rule()
    def take_snapshot(self) -> None:
        self.event += 1
        self.pending = self.event, self.values, tuple(self.state.values())

    @rule(is_full=st.booleans())
    def fill(self, is_full: bool) -> None:
        self.rows.is_full = is_full

    @precondition(lambda self: self.pending is not None)
    @rule()
    def write_snapshot(self) -> None:
        if self.rows.is_full:
            with suppress(StoreFull):
                self.shelf.flush()
        else:
            self.shelf.flush()

    @precondition(lambda self: self.pending is not None and not self.rows.is_full)
    @rule(keeps=st.integers(1, 3), keeps_base=st.booleans())
    def name_snapshot(self, keeps: int, keeps_base: bool) -> None:
        self.write_snapshot()
        assert self.pending is not None
        event, values, _ = self.pending
        base, newest = self.snapshots[:1], [*self.snapshots[1:], (event, values)][-keeps:]
        self.snapshots = [*base, *newest] if keeps_base else newest
        self.shelf.retain([event for event, _ in self.snapshots])
        self.pending = None

    @rule(power=st.booleans())
    def start_again(self, power: bool) -> None:
        """A kill leaves all files, a power cut those that were flushed, and parts of others."""
        if power:
            for name in self.rows.names() - self.rows.flushed:
                self.rows.data[name] = self.rows.data[name][:13]
        self.shelf, self.pending = RowShelf(self.rows), None
        self.shelf.begin(
            {event: {name_of(vector(v)) for v in values.values()} for event, values in self.snapshots}
        )
        newest = self.snapshots[-1] if self.snapshots else (0, {})
        self.event, self.values = newest[0], newest[1]
        self.state = {c: self.shelf.named(name_of(vector(v)), 3) for c, v in self.values.items()}

    @invariant()
    def what_is_referred_to_is_there(self) -> None:
        for client, row in self.state.items():
            assert np.array_equal(numbers(self.shelf, row), vector(self.values[client]))
        for _, values in self.snapshots:
            for value in values.values():
                name = name_of(vector(value))
                assert hashlib.sha256(self.rows.read(name)).hexdigest() == name

    @invariant()
    def what_is_not_goes(self) -> None:
        """When every snapshot is of this very state, nothing else is there."""
        if (
            self.pending is None
            and not self.rows.is_full
            and all(values == self.values for _, values in self.snapshots)
        ):
            self.event += 1
            self.shelf.flush()
            self.shelf.retain([self.event])
            self.snapshots = [(self.event, self.values)]
            assert self.rows.names() == {row.sha256 for row in self.state.values()}


Life.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLife = Life.TestCase


@given(st.lists(st.floats(width=32, allow_nan=True), max_size=20))
@settings(max_examples=50, deadline=None)
def test_any_numbers_come_back(numbers: list[float]) -> None:
    shelf = RowShelf(MemoryRows())
    delta = np.array(numbers, np.float32)
    row = shelf.put(delta)
    found = shelf.take(row)
    assert isinstance(found, np.ndarray)
    assert found.tobytes() == delta.tobytes()
