"""One log, wherever it lies: the same events come out of each adapter, and the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest
from drivers import FIRST, SPEC, Simulated
from memory_log import MemoryLog

from anabranch.core import events as ev
from anabranch.core.config.tables import merge
from anabranch.core.errors import StoreCorrupt
from anabranch.core.journal import Record
from anabranch.core.snapshot import state_digest
from anabranch.host.build import Blueprint
from anabranch.host.journal import Replay
from anabranch.host.log import Journal, Log, WholeLog
from anabranch.reports.journal_files import DigestJournal, JournalReader, JournalWriter
from anabranch.server.manifest import Manifest
from anabranch.server.recovery import recover
from anabranch.server.store.base import Entry, Store
from anabranch.server.store.factory import open_store
from anabranch.server.store.memory import MemoryStore
from anabranch.simulation.disk import Disk, Tail

CONFIG = merge([("test", {"strategy": {"name": "fedasync"}})])
BEGIN = partial(Blueprint.of(CONFIG, SPEC).engine, FIRST)


@pytest.fixture(scope="module")
def told() -> Simulated:
    """A run of two devices, one of which is rolled back."""
    run = Simulated(CONFIG)
    for client_id in ("a", "b"):
        run.enrol(client_id)
    for turn in range(3):
        for client_id, value in (("a", 1.0), ("b", 100.0)):
            run.ask(client_id, f"t-{client_id}{turn}")
            run.push(client_id, f"t-{client_id}{turn}", f"u-{client_id}{turn}", value)
    assert run.roll_back(1, "b") == "version 7 without 3"
    run.ask("a", "t-a3")
    run.push("a", "t-a3", "u-a3", float("nan"), codec="raw")
    return run


def written(log: MemoryLog) -> Iterator[tuple[Record, bytes | None]]:
    for _, record in log.records():
        sent = log.payload(ev.Payload(**record["payload"])) if record["kind"] == "update" else None
        yield record, None if sent is None else bytes(sent)


def filled(journal: Journal, log: MemoryLog) -> None:
    for record, payload in written(log):
        journal.append(record, payload)


def in_store(store: Store, log: MemoryLog) -> Store:
    recover(store, CONFIG, Manifest("test", SPEC, FIRST))
    store.append([Entry(record, payload) for record, payload in written(log)])
    return store


@contextmanager
def in_memory_store(folder: Path, log: MemoryLog) -> Iterator[Log]:
    yield in_store(MemoryStore(), log)


@contextmanager
def in_database(folder: Path, log: MemoryLog) -> Iterator[Log]:
    store = in_store(open_store("", folder), log)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def in_folder(folder: Path, log: MemoryLog) -> Iterator[Log]:
    with JournalWriter(folder, SPEC, FIRST, CONFIG) as journal:
        filled(journal, log)
    reader = JournalReader(folder)
    with reader.open_payloads() as payload:
        yield WholeLog(reader.records, payload)


@contextmanager
def in_logbook(folder: Path, log: MemoryLog) -> Iterator[Log]:
    logbooks = pytest.importorskip("anabranch.flower.logbook", reason="flwr is not installed")
    with logbooks.Logbook(folder, CONFIG, FIRST) as book:
        filled(book, log)
    with logbooks.Logbook(folder, CONFIG, FIRST) as book:
        assert book.resumed
        yield book


@contextmanager
def on_disk(folder: Path, log: MemoryLog) -> Iterator[Log]:
    disk = Disk(DigestJournal(SPEC, CONFIG), BEGIN, every_updates=0)
    filled(disk, log)
    yield Tail(disk._saved, disk._cut())


@contextmanager
def in_memory(folder: Path, log: MemoryLog) -> Iterator[Log]:
    again = MemoryLog()
    filled(again, log)
    yield again


Adapter = Callable[[Path, MemoryLog], AbstractContextManager[Log]]
ADAPTERS: tuple[Adapter, ...] = (in_memory, in_memory_store, in_database, in_folder, in_logbook, on_disk)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda a: a.__name__)
def test_a_log_gives_what_was_written_and_replays(adapter: Adapter, tmp_path: Path, told: Simulated) -> None:
    expected = list(told.log.records())
    with adapter(tmp_path, told.log) as log:
        assert list(log.records()) == list(log.load().tail) == list(log.first().tail) == expected
        assert list(log.records(5)) == expected[5:]
        for _, record in expected:
            if record["kind"] == "update":
                reference = ev.Payload(**record["payload"])
                assert bytes(log.payload(reference)) == bytes(told.log.payload(reference))
        with pytest.raises(StoreCorrupt):
            log.payload(ev.Payload("ab" * 32, 32, "raw", 0))
        replay = Replay(log, BEGIN)
        places = [seq for seq, _, _ in replay]
    assert places == [seq for seq, _ in expected]
    assert state_digest(replay.engine) == state_digest(told.engine)
