"""A run with masked sums in every log: it replays to the same state, and its payloads live as long as it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from machines import SPEC
from masked_bench import MaskedBench, logged, masked_config
from memory_log import MemoryLog
from stores import LIMITS, Backend

from anabranch.core import events as ev
from anabranch.core.journal import payload_of
from anabranch.core.retention import Keep
from anabranch.core.snapshot import state_digest
from anabranch.host.journal import Replay
from anabranch.host.log import Journal, Log, WholeLog
from anabranch.reports.journal_files import DigestJournal, JournalReader, JournalWriter
from anabranch.server.store.archive import ArchivedEvent
from anabranch.server.store.base import ChainLink, Entry, Projection, Store
from anabranch.server.store.factory import open_store
from anabranch.server.store.memory import MemoryStore
from anabranch.simulation.disk import Disk, Tail
from anabranch.testing.store import INFO, enrolled, mask_sum, published, snapshot

CONFIG = masked_config(secagg={"keepers": ["north", "south"]})
FIRST = {"w": np.zeros(4, np.float32)}
Kept = Callable[[Path, MemoryLog], AbstractContextManager[Log]]


@pytest.fixture(scope="module")
def told() -> tuple[MaskedBench, MemoryLog]:
    """A run with versions of cohorts, one that is lost, one that waits for a keeper, one in the making."""
    b = MaskedBench(CONFIG)
    log = logged(b)
    b.enrol(*"abcdef")
    for turn, client in enumerate("abcdefabc"):
        b.give(client, f"{client}{turn}", (turn, 1, -2, 3 * turn), now=float(turn))
    for number, keeper in ((1, "south"), (2, "north"), (1, "north"), (2, "south"), (4, "north")):
        b.answer(number, keeper, now=20.0 + number)
    b.do(ev.CohortDropped(30.0, 3, "why"))
    assert (b.engine.version, [c.number for c in b.cohorts.waiting], len(b.cohorts.members)) == (2, [4], 1)
    return b, log


def filled(journal: Journal, log: MemoryLog) -> None:
    for _, record in log.records():
        named = payload_of(record)
        journal.append(record, None if named is None else log.payload(named))


def in_store(store: Store, log: MemoryLog) -> Store:
    store.start(INFO)
    for _, record in log.records():
        named = payload_of(record)
        store.append([Entry(record, None if named is None else bytes(log.payload(named)))])
    return store


@contextmanager
def in_memory_store(folder: Path, log: MemoryLog) -> Iterator[Log]:
    yield in_store(MemoryStore(), log)


@contextmanager
def in_database(folder: Path, log: MemoryLog) -> Iterator[Log]:
    with closing(in_store(open_store("", folder, LIMITS), log)) as store:
        yield store


@contextmanager
def in_folder(folder: Path, log: MemoryLog) -> Iterator[Log]:
    with JournalWriter(folder, SPEC, FIRST, CONFIG) as journal:
        filled(journal, log)
    reader = JournalReader(folder)
    with reader.open_payloads() as payload:
        yield WholeLog(reader.records, payload)


@contextmanager
def on_disk(folder: Path, log: MemoryLog) -> Iterator[Log]:
    disk = Disk(DigestJournal(SPEC, CONFIG), MaskedBench(CONFIG).restored, every_updates=0)
    filled(disk, log)
    yield Tail(disk._saved, disk._cut())


@pytest.mark.parametrize("kept", [in_memory_store, in_database, in_folder, on_disk])
def test_a_log_replays_to_the_state_that_was(
    kept: Kept,
    tmp_path: Path,
    told: tuple[MaskedBench, MemoryLog],
) -> None:
    b, log = told
    with kept(tmp_path / "log", log) as again:
        replayed = Replay(again, b.restored)
        for _ in replayed:
            pass
        assert state_digest(replayed.engine) == state_digest(b.engine)


def answers(store: Store) -> list[Entry]:
    """A log of answers, small ones and such as go into a pack, and what came of them, with two snapshots."""
    found = [mask_sum(n, bytes([n]) * (8 if n % 2 else 200_000)) for n in range(1, 7)]
    for version, entry in enumerate(found, 1):
        (seq,) = store.append([entry])
        assert seq is not None
        link = ChainLink(f"{version:064x}", f"{version:064x}")
        store.append([], [Projection(seq, 3.0, (published(version),), {}, {version: link})])
    return found


def test_an_answer_that_is_damaged_is_found(tmp_path: Path) -> None:
    store = Backend("sqlite", "", tmp_path / "data").start()
    answers(store)
    store.close()
    with closing(sqlite3.connect(tmp_path / "data" / "anabranch.db")) as database:
        places = database.execute("SELECT pack, pack_offset FROM mask_sums WHERE seq < 3").fetchall()
        database.execute("DELETE FROM mask_sums WHERE seq = 3")
        database.commit()
    for number, offset in places:
        path = tmp_path / "data" / "log" / f"{number:06d}.log"
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
    found = Backend("sqlite", "", tmp_path / "data").open().problems()
    assert [line for line in found if "answer" in line and "row" in line] == [
        "event 3 is a keeper's answer without a row in mask_sums"
    ]
    assert any(line.startswith("event 1, a keeper's answer: ") for line in found)
    assert any(line.startswith("event 2, a keeper's answer: ") for line in found)
    assert not any("event 5" in line for line in found)


def test_answers_go_with_their_events_and_packs_when_no_row_names_them(backend: Backend) -> None:
    store = backend.start()
    found = answers(store)
    for seq in (4, 5, 6):
        store.save_snapshot(snapshot(seq), seq, float(seq), Keep.of("versions:1"))
    while store.trim(10):
        pass
    left = {payload_of(record).sha256 for _, record in store.records()}  # type: ignore[union-attr]
    assert len(left) < len(found), "something was dropped"
    for entry in found:
        named = payload_of(entry.record)
        assert named is not None
        if named.sha256 in left:
            assert bytes(store.payload(named)) == entry.inline
        else:
            with pytest.raises(Exception, match=named.sha256):
                store.payload(named)
    assert store.problems() == []
    store.close()


def test_an_archive_keeps_what_answers_are_made_of() -> None:
    entry = mask_sum(1, b"1234")
    assert ArchivedEvent(1, entry.record, None).payload == payload_of(entry.record)
    assert ArchivedEvent(1, enrolled().record, None).payload is None
