"""Another process looks while a server writes: it sees all that is acknowledged, though no row has it yet."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from desks import Desk, settings
from sqlalchemy import Engine, event
from stores import LIMITS, Backend, sqlite_first

from anabranch.core.errors import LogLost, StoreFull
from anabranch.core.retention import Keep
from anabranch.server.store.base import ChainLink, Entry, Projection, Store
from anabranch.server.store.factory import open_store
from anabranch.server.store.overlay import Overlay
from anabranch.server.store.sqlite_store import SqliteStore
from anabranch.server.verify import verify
from anabranch.testing.store import INFO, asked, logged, numbered, published, reference, snapshot, update


def opened(folder: Path) -> SqliteStore:
    store = open_store("", folder, LIMITS)
    assert isinstance(store, SqliteStore)
    return store


def started(folder: Path) -> SqliteStore:
    store = opened(folder)
    store.start(INFO)
    return store


class Work:
    """A server that does one thing or another, and what it has acknowledged."""

    def __init__(self, folder: Path, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.random, self.patch = folder, random.Random(seed), patch
        self.store, self.known = started(folder), list[Entry]()
        self.reader: Store | None = None

    def step(self) -> None:
        """The next thing."""
        steps = (self.append, self.append, self.append, self.rows, self.ends, self.refused, self.killed)
        self.random.choice(steps)()

    def some(self) -> list[Entry]:
        """A few events."""
        first, count = len(self.known) + 1, self.random.randint(1, 4)
        return [
            update(n) if self.random.random() < 0.7 else asked(f"t{n}") for n in range(first, first + count)
        ]

    def append(self) -> None:
        some = self.some()
        self.store.append(some)
        self.known += some

    def rows(self) -> None:
        self.store.append([], [Projection(1, 1.0, ())])

    def ends(self) -> None:
        self.store._segments.close()

    def refused(self) -> None:
        """Another process may have seen it while it was written."""

        def no_space(_: int) -> None:
            self.seen()
            raise OSError(errno.ENOSPC, "no space left on device")

        self.patch.setattr(os, "fdatasync", no_space)
        with pytest.raises(StoreFull):
            self.store.append([update(len(self.known) + 1, b"refused"), asked("refused")])
        self.patch.undo()

    def seen(self) -> None:
        """By whoever looks."""
        if self.reader is not None:
            list(self.reader.records())

    def killed(self) -> None:
        self.store._following.clear()
        self.store._database.close()
        assert self.store._lock is not None
        self.store._lock.release()
        self.store = started(self.folder)


on_disk = sqlite_first()


@pytest.mark.parametrize("seed", range(4))
def test_a_reader_sees_what_is_acknowledged(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(tmp_path, seed, monkeypatch)
    work.append()
    work.reader = reader = opened(tmp_path)
    for _ in range(40):
        work.step()
        if work.random.random() < 0.7:
            check(reader, work.known)
    check(reader, work.known)
    assert [line for line in reader.problems() if "decided" not in line] == []
    reader.close()
    work.store.close()


def check(reader: Store, known: list[Entry]) -> None:
    assert logged(reader) == numbered(known)
    for entry in known:
        if entry.record["kind"] == "update":
            assert bytes(reader.payload(reference(entry))) == entry.inline


def test_payloads_are_read_one_after_the_other_without_a_look_at_the_log_for_each(tmp_path: Path) -> None:
    writer, reader, many = started(tmp_path), opened(tmp_path), 30
    writer.append([update(number) for number in range(many)])
    statements: list[str] = []
    assert reader.payload(reference(update(0))), "which looks"
    raw = reader._database._connection.connection.dbapi_connection  # type: ignore[union-attr]
    raw.set_trace_callback(statements.append)  # type: ignore[union-attr]
    for number in range(many):
        assert reader.payload(reference(update(number)))
    assert sum(each.startswith("SELECT") for each in statements) == many
    writer.append([update(many)])
    assert reader.payload(reference(update(many))), "which has come since"
    for store in (reader, writer):
        store.close()


def test_a_look_that_fails_leaves_the_next_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, reader = started(tmp_path), opened(tmp_path)
    known = [update(1), asked("t2"), update(3)]
    put = Overlay._put

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    for entry in known:
        store.append([entry])
        monkeypatch.setattr(Overlay, "_put", cut)
        with pytest.raises(KeyboardInterrupt):
            logged(reader)
        monkeypatch.setattr(Overlay, "_put", put)
    check(reader, known)
    reader.close()
    store.close()


def test_a_segment_that_goes_while_another_process_looks_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reader, known = started(tmp_path), opened(tmp_path), [update(n) for n in range(1, 5)]
    store.append(known[:1])
    needed = reader._segments.needed

    def slow(run_id: str, after: int) -> object:
        """Between the look at the rows and the look at the log the server goes on, and trims."""
        monkeypatch.setattr(reader._segments, "needed", needed)
        for version, entry in enumerate(known[1:], 2):
            store._segments.close()
            store.append([entry])
            link = ChainLink(f"{version:064x}", f"{version:064x}")
            store.append([], [Projection(version, 3.0, (published(version - 1),), {}, {version - 1: link})])
        for seq in (2, 3, 4):
            store.save_snapshot(snapshot(seq - 1), seq, float(seq), Keep.of("versions:1"))
        while store.trim(10):
            pass
        return needed(run_id, after)

    monkeypatch.setattr(reader._segments, "needed", slow)
    with reader._reading():
        assert reader._overlay.flaw is None
    assert len(list((tmp_path / "log").iterdir())) < len(known)
    reader.close()
    store.close()


def test_what_came_of_earlier_events_is_written_though_only_resends_follow(tmp_path: Path) -> None:
    """What a snapshot has folded is in the rows before its file is written."""
    desk = Desk(opened(tmp_path), tmp_path, settings())
    desk.enrol("a")
    for number in range(2):
        desk.push(desk.ask("a", f"t{number}"), 1.0)
    store, (*_, (_, record)) = desk.store, desk.store.records()  # all events have rows now
    assert store.append([Entry(record)], desk.books._projections) == [None]  # a resend
    desk.books._projections = []
    desk.books.project()
    with closing(sqlite3.connect(tmp_path / "anabranch.db")) as rows:
        assert rows.execute("SELECT count(*) FROM model_versions").fetchone() == (1,)
    desk.drop()


def killed_with_a_snapshot(folder: Path, version: int) -> Path:
    """What a server had that made one version, which its rows do not have, and the file of a snapshot."""
    desk = Desk(opened(folder), folder, settings())
    desk.work(2)
    store = desk.store
    assert isinstance(store, SqliteStore)
    path = store._snapshots.path(store.write_snapshot(snapshot(version)))
    store._following.clear()
    desk.drop()
    with closing(sqlite3.connect(folder / "anabranch.db")) as rows:
        assert rows.execute("SELECT count(*) FROM model_versions").fetchone() == (0,)
    return path


def test_a_snapshot_of_a_version_that_no_replay_comes_to_is_a_loss_and_is_kept(tmp_path: Path) -> None:
    path = killed_with_a_snapshot(tmp_path, 2)
    (problem,) = verify(tmp_path).problems
    assert f"{path} is of version 2, and the log comes to version 1" in problem
    for _ in range(2):
        with pytest.raises(LogLost, match=path.name):
            Desk(store := opened(tmp_path), tmp_path, settings())
        store.close()
        assert path.exists()
        assert [line for line in verify(tmp_path).problems if path.name in line]


def test_a_snapshot_of_a_version_that_a_replay_comes_to_is_none(tmp_path: Path) -> None:
    path = killed_with_a_snapshot(tmp_path, 1)
    assert verify(tmp_path).problems == ()
    desk = Desk(opened(tmp_path), tmp_path, settings())
    assert not path.exists(), "no row names it: it is made again"
    desk.drop()


def test_numbers_that_rows_name_are_not_given_again(tmp_path: Path) -> None:
    store = started(tmp_path)
    store.append([update(1)])
    store.append([])
    store.close()
    shutil.rmtree(tmp_path / "log")
    store = started(tmp_path)
    store.append([update(2)])
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["000002.log"]
    store.close()


def test_what_is_lost_is_told_each_time(tmp_path: Path) -> None:
    store, reader = started(tmp_path), opened(tmp_path)
    for n in range(1, 4):
        store.append([update(n)])
    path = tmp_path / "log/000001.log"
    data = bytearray(path.read_bytes())
    data[data.index(b"payload 2")] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        assert [seq for seq, _ in reader.records()] == [1]
        assert any("events are lost" in line for line in reader.problems())
    store.append([])
    with closing(sqlite3.connect(tmp_path / "anabranch.db")) as rows:
        assert rows.execute("SELECT count(*) FROM events").fetchone() == (3,)
    assert [seq for seq, _ in reader.records()] == [1, 2, 3]
    assert not any("events are lost" in line for line in reader.problems())
    reader.close()
    store.close()


def test_a_damaged_beginning_hides_nothing_that_is_whole_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A start is refused, a reader has what is whole and says what is not; an operator's word keeps it."""
    store = started(tmp_path)
    for n in range(1, 4):
        store.append([update(n)])
        store._segments.close()
    store._following.clear()
    store.close()
    path = tmp_path / "log/000003.log"
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(LogLost, match=r"000003\.log is damaged in its beginning"):
            started(tmp_path)
        reader = opened(tmp_path)
        caplog.clear()
        assert [seq for seq, _ in reader.records()] == [1, 2]
        assert [record.message for record in caplog.records if path.name in record.message]
        assert any(f"{path.name} is damaged in its beginning" in line for line in reader.problems())
        reader.close()
    assert path.read_bytes() == data
    reader = opened(tmp_path)
    reader.disown()
    reader.close()
    store = started(tmp_path)
    store.append([update(3)])
    assert [seq for seq, _ in store.records()] == [1, 2, 3]
    store.close()


class ServerBetween:
    """A server that makes versions, with a snapshot of each, behind some statement of another process."""

    def __init__(self, store: Store) -> None:
        self.store, self.version, self.due = store, 0, 0

    def goes_on(self) -> None:
        for version in range(self.version + 1, self.version + 5):  # more than snapshots are kept
            self.store.append([asked(f"t{version}")])
            link = ChainLink(f"{version:064x}", f"{version:064x}")
            self.store.append(
                [], [Projection(version, float(version), (published(version),), {}, {version: link})]
            )
            self.store.save_snapshot(snapshot(version), version, float(version))
        self.version = version

    def hear(self, *_: object) -> None:
        self.due -= 1
        if not self.due:
            self.goes_on()


def a_snapshot(store: Store) -> list[str]:
    return [] if store.load().snapshot is not None else ["none that can be read"]


@pytest.mark.parametrize("look", [lambda store: store.problems(), a_snapshot], ids=["problems", "load"])
def test_what_a_server_does_between_two_looks_is_no_damage(
    look: Callable[[Store], list[str]], on_disk: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told to restore a backup, of a log that had gone on and of snapshots that were dropped since."""
    server, statement = ServerBetween(on_disk.start()), 0
    server.goes_on()
    while server.due <= 0:  # behind each of them in turn
        statement += 1
        server.due, reader = statement, on_disk.open()
        event.listen(Engine, "after_cursor_execute", server.hear)
        try:
            assert look(reader) == []
        finally:
            event.remove(Engine, "after_cursor_execute", server.hear)
            reader.close()
    assert statement > 3
    assert caplog.messages == []
    server.store.close()
