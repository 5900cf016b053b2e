"""A snapshot is written while the run goes on: it is of the moment when it was taken, and nobody waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
from desks import LIMITS, Desk, settings

from anabranch.core import events as ev
from anabranch.core.clock import EventClock
from anabranch.core.errors import StoreError, StoreFull, StoreUnreachable
from anabranch.core.model.updates import Capability
from anabranch.core.snapshot import Snapshot, restore, state_digest
from anabranch.server.saving import AtOnce, Every
from anabranch.server.store.base import Store
from anabranch.server.store.factory import open_store
from anabranch.server.store.memory import MemoryStore
from anabranch.server.writer import Writer

EVERY_FOUR = settings(
    server={"snapshot_every_versions": 0, "snapshot_every_updates": 4, "snapshot_every_events": 0}
)
WAIT_S = 600.0


class ByHand(Executor):
    """Runs what it was given when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - for whoever asks for the outcome
                future.set_exception(error)

        self.waiting.append(run)
        return future

    def run(self) -> None:
        self.waiting.pop(0)()


@pytest.fixture
def by_hand() -> ByHand:
    return ByHand()


def begun(store: Store, tmp_path: Path, by_hand: ByHand) -> Desk:
    """Four updates, and a snapshot of them that is taken and not written."""
    desk = Desk(store, tmp_path, EVERY_FOUR)
    desk.books.saving.executor = by_hand
    desk.work(4)
    assert len(by_hand.waiting) == 1
    return desk


def loaded(desk: Desk) -> str:
    """The digest of the newest snapshot."""
    snapshot, engine = desk.store.load().snapshot, desk.books.engine
    assert snapshot is not None
    return state_digest(restore(snapshot, engine.spec, engine.strategy, engine.settings))


def test_it_is_of_the_moment_when_it_was_taken(tmp_path: Path, by_hand: ByHand) -> None:
    desk = begun(open_store("", tmp_path, LIMITS), tmp_path, by_hand)
    taken, seq = desk.digest, desk.books.seq
    desk.work(9, clients=5, first=100)
    assert len(by_hand.waiting) == 1  # one at a time, though another is due
    assert desk.store.load().snapshot is None
    by_hand.run()
    assert desk.store.load().snapshot is None  # it counts once it is named
    desk.enrol("somebody")
    assert desk.store.load().applied_through_seq == seq
    assert loaded(desk) == taken
    assert desk.store.problems() == []
    before = desk.digest
    desk.drop()
    again = Desk(open_store("", tmp_path, LIMITS), tmp_path, EVERY_FOUR)
    assert (again.found.saved.seq, again.digest) == (seq, before)
    again.drop()


def test_the_next_one_waits_twenty_times_as_long_as_one_took(tmp_path: Path, by_hand: ByHand) -> None:
    now_s = 100.0
    desk = Desk(open_store("", tmp_path, LIMITS), tmp_path, EVERY_FOUR)
    desk.books.saving.executor, desk.books.saving.clock = by_hand, lambda: now_s
    desk.work(4)
    now_s = 103.0
    by_hand.run()
    desk.work(4, clients=5, first=100)  # three seconds after it was taken it is named, and another is due
    now_s = 103.0 + 59.9
    desk.enrol("somebody")
    assert not by_hand.waiting
    now_s = 103.0 + 60.0
    desk.enrol("another")
    assert len(by_hand.waiting) == 1
    desk.drop()


def test_the_next_one_has_what_came_meanwhile(tmp_path: Path, by_hand: ByHand) -> None:
    desk = begun(open_store("", tmp_path, LIMITS), tmp_path, by_hand)
    desk.work(3, clients=7, first=100)
    by_hand.run()
    desk.books.saving.executor = AtOnce()
    desk.books.save(desk.now)
    assert loaded(desk) == desk.digest
    desk.drop()


def test_one_that_is_never_named_is_nothing(tmp_path: Path, by_hand: ByHand) -> None:
    """The server is killed after the file and before its row."""
    desk = begun(open_store("", tmp_path, LIMITS), tmp_path, by_hand)
    by_hand.run()
    before = desk.digest
    desk.drop()
    again = Desk(open_store("", tmp_path, LIMITS), tmp_path, EVERY_FOUR)
    assert (again.found.saved.seq, again.digest) == (0, before)
    assert list((tmp_path / "snapshots").iterdir()) == []
    again.drop()


@pytest.mark.parametrize("kind", [StoreFull, StoreUnreachable])
def test_one_that_cannot_be_written_takes_its_changes_to_the_next(
    kind: type[StoreError], tmp_path: Path, by_hand: ByHand, caplog: pytest.LogCaptureFixture
) -> None:
    desk = begun(open_store("", tmp_path, LIMITS), tmp_path, by_hand)
    write = desk.store.write_snapshot

    def fail(snapshot: Snapshot) -> str:
        desk.store.write_snapshot = write  # type: ignore[method-assign]
        raise kind("no room")

    desk.store.write_snapshot = fail  # type: ignore[method-assign]
    by_hand.run()
    desk.enrol("somebody")
    assert "no snapshot was written: no room" in caplog.text
    desk.work(2, clients=6, first=100)
    for _ in range(2):  # the one that is due by now, if it is, and the last
        while by_hand.waiting:
            by_hand.run()
        desk.enrol("another")
    desk.books.saving.executor = AtOnce()
    desk.books.save(desk.now)
    assert loaded(desk) == desk.digest
    desk.drop()


def test_nobody_waits_for_one_that_is_being_written(tmp_path: Path) -> None:
    """The disk takes its time over the file: all is answered, and then the file is named."""
    at_work, go, named = threading.Event(), threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def write_snapshot(self, snapshot: Snapshot) -> str:
            at_work.set()
            assert go.wait(WAIT_S)
            return super().write_snapshot(snapshot)

        def save_snapshot(self, *args: Any, **more: Any) -> None:
            super().save_snapshot(*args, **more)
            named.set()

    desk = Desk(Slow(LIMITS), tmp_path, settings())

    async def run() -> None:
        found, clock = desk.found, EventClock(desk.now, lambda: 0.0, lambda: 0.0)
        every = Every(events=3)
        writer = Writer(found.engine, desk.store, desk.models, clock, found.history, every=every)
        writer.start()
        for number in range(3):
            await writer.submit(ev.Enrolled(1.0 + number, f"c{number}", Capability()))
        assert await asyncio.to_thread(at_work.wait, WAIT_S)
        for number in range(3, 8):
            await writer.submit(ev.Enrolled(1.0 + number, f"c{number}", Capability()))
        assert desk.store.load().snapshot is None
        go.set()
        assert await asyncio.to_thread(named.wait, WAIT_S)  # without another call of anybody
        assert desk.store.load().applied_through_seq == 3
        await writer.close()
        assert desk.store.load().applied_through_seq == 8

    asyncio.run(run())
    desk.drop()
