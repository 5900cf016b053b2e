"""What a log need not keep goes, behind the interface of the store, and everything else goes on."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from desks import TENSORS, Desk, settings
from sqlalchemy import inspect
from stores import BACKENDS, LIMITS, ON_DISK, Backend, row_counts, sqlite_first

from anabranch.core import events as ev
from anabranch.core.config.tables import merge
from anabranch.core.errors import ConfigError, DataError, StoreCorrupt, StoreFull, UnknownVersion
from anabranch.core.model.updates import Reason, Task, Verdict
from anabranch.core.retention import Keep
from anabranch.host.build import Blueprint
from anabranch.host.journal import Replay
from anabranch.server import verify as verify_module
from anabranch.server.books import Call
from anabranch.server.export import export_run
from anabranch.server.history import head_at
from anabranch.server.store import schema
from anabranch.server.store.base import DiskFailed, Store
from anabranch.server.store.blobs import ADOPTED_S
from anabranch.server.store.memory import MemoryStore
from anabranch.server.store.segments import TRIMMED_BYTES
from anabranch.server.store.sql import SqlStore
from anabranch.server.store.sqlite_store import SqliteStore
from anabranch.server.verify import verify
from anabranch.testing.store import publish, reference, trimmed, update, upload

FEW = replace(LIMITS, receipts_max=50)
ROUNDS, PAIRS = {"name": "fedavg"}, {"name": "fedbuff", "buffer_size": 2}


def keeping(what: str) -> Any:
    return settings(server={"snapshot_every_versions": 2, "keep": what})


class Place:
    """A data folder of a kind of store, whose server is stopped and started."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        self.backend, self.folder = backend, folder

    def open(self, keep: str = "versions:4") -> Desk:
        desk = Desk(self.backend.open(FEW), self.folder, keeping(keep), FEW)
        desk.books.saving._not_before = float("-inf")
        return desk


on_disk = sqlite_first()


@pytest.fixture
def place(backend: Backend, tmp_path: Path) -> Place:
    return Place(backend, tmp_path / "data")


def seqs(store: Store) -> list[int]:
    return [seq for seq, _ in store.records()]


def test_nothing_is_dropped_of_a_log_that_took_the_place_of_the_locked_one(tmp_path: Path) -> None:
    place = Place(Backend("sqlite", "", tmp_path / "data"), tmp_path / "data")
    desk = place.open()
    desk.busy(60)
    assert isinstance(desk.store, SqlStore)
    desk.store._begin = desk.books.seq  # more is due
    shutil.copytree(place.folder.rename(tmp_path / "moved"), place.folder)
    with pytest.raises(DiskFailed, match="is not what this server has locked"):
        desk.store.trim(1)
    desk.drop()


def test_what_is_behind_goes_and_a_restart_is_the_same(place: Place) -> None:
    desk = place.open()
    desk.busy(60)
    assert desk.books.engine.version == 30
    begin = desk.store.first()
    assert begin.snapshot is not None
    base = begin.snapshot.meta["version"]
    assert 30 - 12 <= base <= 30 - 4
    kept = seqs(desk.store)
    assert kept == list(range(kept[0], desk.books.seq + 1))
    assert len(kept) < 40
    assert [row.version for row in desk.store.versions()] == list(range(base, 31))
    assert desk.store.problems() == []
    before = desk.digest
    desk.drop()
    again = place.open()
    assert again.digest == before
    assert again.books.history.head == desk.books.history.head
    again.drop()


def test_a_server_that_was_killed_as_it_dropped_drops_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another snapshot: one that holds too much takes nothing, and would come to none."""
    monkeypatch.setattr("anabranch.server.books.TRIMMED_AT_ONCE", 1)
    desk = place.open("versions:1")
    desk.busy(1)
    while seqs(desk.store)[0] == 1:
        desk.busy(1, first=desk.books.seq)
    left = seqs(desk.store)[0]
    desk.drop()
    again = place.open("versions:1")
    for device in range(3):
        again.enrol(f"d{device}")  # no version of the model
    assert seqs(again.store)[0] >= left + 2
    again.drop()


class Unheard(Executor):
    """Does what it is given at once, which it looks as if it were at still: until somebody waits for it."""

    class Outcome(Future[Any]):
        def done(self) -> bool:
            return False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        made = self.Outcome()
        made.set_result(fn(*args, **kwargs))
        return made


def killed_and_back(place: Place) -> tuple[Desk, Task]:
    """The answer to this task makes a snapshot due, whose file is there before anybody hears of it."""
    desk = place.open("all")
    desk.busy(15)  # every second one makes a version, and every second version a snapshot
    task = desk.ask("c0", "last")
    desk.drop()
    again = place.open("versions:1")
    again.books.saving.executor = Unheard()
    return again, task


def check_sound(desk: Desk, place: Place) -> None:
    """The newest snapshot is of the end, and a start goes on from it."""
    assert desk.store.load().applied_through_seq == desk.books.seq
    assert desk.store.problems() == []
    before = desk.digest
    desk.drop()
    again = place.open("versions:1")
    assert (again.digest, again.found.saved.seq) == (before, again.found.seq)
    again.drop()


def test_a_start_drops_no_snapshot_that_is_being_written(place: Place) -> None:
    """What its `keep` lets go goes with the first batch, and that may be the one with which one is due."""
    desk, task = killed_and_back(place)
    desk.push(task, 1.0)
    assert desk.books.saving._taken is not None
    desk.books._name_snapshot(wait=True)
    check_sound(desk, place)


def test_nor_does_a_rollback_that_drops_first(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, task = killed_and_back(place)

    def no_room(_: Keep) -> None:
        monkeypatch.undo()
        raise StoreFull("no room")

    monkeypatch.setattr(desk.store, "retain", no_room)
    desk.push(task, 1.0)
    assert desk.books.saving._taken is not None
    order = ev.RolledBack(desk.tick(), 7, 0, ("c1",))
    call = Call(order, folding=desk.books.begin_rollback(order))
    assert desk.store.first().snapshot is None
    desk.books.commit([call])
    assert call.error is None
    assert desk.store.first().snapshot is not None
    check_sound(desk, place)


@pytest.mark.parametrize("before", ["all", "versions:20"])
def test_what_a_start_says_to_keep_drops_by_the_snapshots_that_are_there(place: Place, before: str) -> None:
    """One that holds too much takes nothing: it would come to no snapshot, and so to no room."""
    desk = place.open(before)
    desk.busy(60)
    begin, version, digest = seqs(desk.store)[0], desk.books.engine.version, desk.digest
    desk.drop()
    again = place.open("versions:1")
    assert (seqs(again.store)[0], again.digest) == (begin, digest)
    again.enrol("new")  # no version of the model
    base = again.store.first().snapshot
    assert base is not None
    assert version - 8 <= base.meta["version"] < version
    assert seqs(again.store)[0] > begin
    assert again.store.problems() == []
    kept = again.digest
    again.drop()
    last = place.open("versions:1")
    assert last.digest == kept
    last.busy(20, first=60)
    assert last.store.problems() == []
    last.drop()


def test_that_much_is_dropped_is_said_when_it_begins_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(Backend("sqlite", "", tmp_path / "data"), tmp_path / "data")
    desk = place.open("all")
    desk.busy(60)
    desk.drop()
    monkeypatch.setattr("anabranch.server.store.trimming.TOLD_EVENTS", 60)
    monkeypatch.setattr("anabranch.server.books.TRIMMED_AT_ONCE", 40)
    again = place.open("versions:1")
    with caplog.at_level(logging.INFO, "anabranch.server.store.trimming"):
        for device in range(12):
            again.enrol(f"d{device}")  # no version of the model
    begin = seqs(again.store)[0]
    assert caplog.messages == [
        f"dropping {begin - 1} events up to event {begin - 1}: server.keep lets them go",
        f"dropped {begin - 1} events: the log begins with event {begin}",
    ]
    assert begin > 2 * 40, "in several pieces"
    caplog.clear()
    again.busy(20, first=60)
    assert seqs(again.store)[0] > begin
    assert caplog.messages == [], "nothing is said of little"
    again.drop()


@BACKENDS
def test_the_same_run_with_the_whole_log_has_the_same_model_and_heads(place: Place, tmp_path: Path) -> None:
    """Only what is kept differs: versions, digests and verdicts are those of the whole log."""
    kept, whole = place.open(), Desk(MemoryStore(FEW), tmp_path / "whole", keeping("all"), FEW)
    for desk in (kept, whole):
        desk.busy(30)
    assert kept.books.engine.counters == whole.books.engine.counters
    assert (kept.books.engine.vector == whole.books.engine.vector).all()
    assert len(seqs(kept.store)) < len(seqs(whole.store)) == whole.books.seq == kept.books.seq
    for desk in (kept, whole):
        desk.drop()


def test_what_refers_to_an_event_is_found_without_a_look_at_all_of_it(
    on_disk: Backend, tmp_path: Path
) -> None:
    """Databases look for it with each event that is dropped: of a long log that would be all that they do."""
    desk = Place(on_disk, tmp_path / "data").open()
    assert isinstance(desk.store, SqlStore)
    desk.busy(30)
    assert seqs(desk.store)[0] > 1
    with desk.store._reading() as connection:
        tables = inspect(connection)
        for table in tables.get_table_names():
            begin: set[str | None] = {tables.get_pk_constraint(table)["constrained_columns"][0]}
            begin |= {index["column_names"][0] for index in tables.get_indexes(table)}
            for key in tables.get_foreign_keys(table):
                if key["referred_table"] == schema.events.name:
                    assert set(key["constrained_columns"]) <= begin, table
    desk.drop()


def test_every_link_of_the_chain_stays(place: Place) -> None:
    """A device that was away since version 3 follows the chain to the newest one."""
    desk = place.open()
    heads = {}
    for number in range(40):
        desk.busy(1, first=number)
        heads[desk.books.history.version] = desk.books.history.head
    assert desk.store.versions()[0].version > 3
    assert len(desk.store.links(0, 1000)) == 20
    assert desk.store.links(3, 5) == desk.store.links(0, 1000)[3:8]
    assert desk.store.links(19, 5) == desk.store.links(0, 1000)[19:]
    assert desk.store.links(20, 5) == []
    for version, head in heads.items():
        assert head_at(desk.store, version) == head
    desk.drop()


@BACKENDS
def test_the_newest_two_snapshots_have_their_tails(place: Place) -> None:
    desk = place.open("versions:1")
    desk.busy(40)
    before = desk.digest
    desk.drop()
    place.backend.damage("snapshot")
    again = place.open("versions:1")
    assert again.found.replayed > 0
    assert again.digest == before
    again.drop()


@ON_DISK
def test_a_shortened_log_without_a_good_snapshot_is_corrupt(on_disk: Backend, tmp_path: Path) -> None:
    """It is never taken for a run that has only just begun."""
    place = Place(on_disk, tmp_path / "data")
    desk = place.open()
    desk.busy(40)
    desk.drop()
    for sha256 in on_disk.snapshots():
        on_disk.lose(sha256)
    with pytest.raises(StoreCorrupt, match="no snapshot can be read"):
        place.open()


@pytest.mark.parametrize("damage", ["UPDATE receipts SET receipt = '[]'", "DELETE FROM receipts"])
def test_a_receipt_that_is_damaged_in_every_snapshot_costs_that_receipt(
    on_disk: Backend, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log cannot make it again. What becomes of its update is as if it were too old to be known."""
    place, told = Place(on_disk, tmp_path / "data"), "receipt 1 is damaged, and no snapshot is without it"
    database = "" if on_disk.kind == "sqlite" else on_disk.database
    desk = place.open()
    desk.enrol("early")
    first = desk.ask("early", "early-task")
    desk.push(first, 0.5)
    desk.busy(40)
    vector, applied = desk.books.engine.vector.copy(), desk.books.engine.counters.applied
    assert seqs(desk.store)[0] > 5
    desk.drop()
    on_disk.execute(f"{damage} WHERE number = 1")
    again = place.open()
    assert caplog.text.count(told) == 1
    assert (again.books.engine.vector == vector).all()
    decision = again.push(first, 0.5).receipt.decision
    assert (decision.verdict, decision.reason) == (Verdict.REJECTED, Reason.UNKNOWN_TASK)
    assert again.books.engine.counters.applied == applied
    assert len(again.store.problems()) == 3, "of each snapshot"
    again.busy(4, first=40)
    assert again.store.problems() == [], "the next snapshot has written all rows anew"
    before = again.digest
    again.drop()
    caplog.clear()
    last = place.open()
    assert (last.digest, caplog.messages) == (before, [])
    last.drop()
    assert verify(place.folder, database).problems == ()


def test_a_device_that_is_damaged_in_every_snapshot_is_a_loss(on_disk: Backend, tmp_path: Path) -> None:
    place = Place(on_disk, tmp_path / "data")
    desk = place.open()
    desk.enrol("early")
    desk.busy(40)
    desk.drop()
    on_disk.execute("UPDATE client_records SET record = '{}' WHERE client_id = 'early'")
    with pytest.raises(StoreCorrupt, match="no snapshot can be read"):
        place.open()


@BACKENDS
def test_a_resent_update_and_an_open_task_from_behind_the_log(place: Place) -> None:
    desk = place.open()
    desk.enrol("early")
    desk.enrol("slow")
    slow, early = desk.ask("slow", "slow-task"), desk.ask("early", "early-task")
    answered = desk.push(early, 0.5).receipt
    desk.busy(30)
    assert desk.books.seq > seqs(desk.store)[0] > 5
    assert desk.store.receipt("u-early-task") is None, "its row is behind the log"
    again = desk.push(early, 0.5)
    assert (again.receipt, again.duplicate) == (answered, True)
    late = desk.push(slow, 0.25).receipt.decision
    assert late.verdict is not Verdict.REJECTED
    assert late.staleness >= 15
    desk.busy(60, first=30)
    applied, before = desk.books.engine.counters.applied, desk.books.engine.vector.copy()
    forgotten = desk.push(early, 0.5).receipt.decision
    assert (forgotten.verdict, forgotten.reason) == (Verdict.REJECTED, Reason.UNKNOWN_TASK)
    assert desk.books.engine.counters.applied == applied
    assert (desk.books.engine.vector == before).all()
    assert desk.store.problems() == []
    desk.drop()


def test_a_rollback_goes_back_as_far_as_the_log(place: Place, tmp_path: Path) -> None:
    """To a version that is kept: the model is that of the same rollback over the whole log."""
    kept, whole = place.open(), Desk(MemoryStore(FEW), tmp_path / "whole", keeping("all"), FEW)
    for desk in (kept, whole):
        desk.busy(40)
        back_to(desk, 18, "c1")
        desk.busy(1, first=40)
    assert (kept.books.engine.vector == whole.books.engine.vector).all()
    assert kept.books.engine.version == whole.books.engine.version
    assert kept.books.engine.pending == whole.books.engine.pending
    assert kept.store.first().snapshot is not None
    assert whole.store.first().snapshot is None
    before = kept.digest
    kept.drop()
    whole.drop()
    again = place.open()
    assert again.digest == before
    with pytest.raises(UnknownVersion, match=r"version 2 cannot be gone back to: the log begins with event"):
        back_to(again, 2, "c1")
    again.busy(40, first=41)
    assert seqs(again.store)[0] > again.found.seq, "the log has left the rollback behind"
    before = again.digest
    again.drop()
    last = place.open()
    assert last.digest == before
    last.drop()


@pytest.mark.parametrize("at_once", [0, 1, 30, 90])
def test_a_log_that_begins_later_while_a_rollback_is_made_of_it(tmp_path: Path, at_once: int) -> None:
    """The rollback is that of the log as it begins then, or is refused: a replay comes to the same."""
    desk = Desk(MemoryStore(FEW), tmp_path, keeping("versions:4"), FEW)
    whole = Desk(MemoryStore(FEW), tmp_path / "whole", keeping("all"), FEW)
    for of in (desk, whole):
        of.busy(40)
    begins = desk.store.first().applied_through_seq
    order, late = (ev.RolledBack(desk.now, version, 0, ("c1",)) for version in (20, 17))
    foldings = [desk.books.begin_rollback(event) for event in (order, late)]
    for folding in foldings:
        folding.advance(at_once)
    number = 40
    while desk.store.first().applied_through_seq == begins:
        desk.busy(1, first=number)
        whole.busy(1, first=number)
        number += 1
    for folding in foldings:
        folding.advance(1)
    refused = Call(late, folding=foldings[1])
    desk.books.commit([refused])
    assert re.match("version 17 cannot be gone back to: the log begins with event", str(refused.error))
    desk.books.commit([call := Call(order, folding=foldings[0])])
    assert call.error is None
    back_to(whole, 20, "c1")
    assert (desk.books.engine.vector == whole.books.engine.vector).all()
    replay = Replay(desk.store, partial(blueprint(desk).engine, TENSORS), None, desk.store.receipt)
    assert len(list(replay)) > 0
    assert (replay.engine.vector == desk.books.engine.vector).all()
    desk.drop()
    whole.drop()


def test_a_log_that_is_about_to_begin_later_does_so_before_a_rollback(tmp_path: Path) -> None:
    """Or a replay would begin with a snapshot of before it, though it was folded from the first event."""
    desk = Desk(MemoryStore(FEW), tmp_path, keeping("versions:4"), FEW)
    trim, desk.books._trim_if_due = desk.books._trim_if_due, lambda: None  # type: ignore[method-assign]
    desk.busy(30)
    desk.books._trim_if_due = trim  # type: ignore[method-assign]
    order = ev.RolledBack(desk.now, 6, 0, ("c1",))
    call = Call(order, folding=desk.books.begin_rollback(order))
    desk.books.commit([call])
    assert re.match("version 6 cannot be gone back to: the log begins with event", str(call.error))
    desk.drop()


@pytest.mark.parametrize(("times", "problems"), [(1, 0), (9, 2)])
def test_a_server_that_drops_what_is_being_verified_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, problems: int
) -> None:
    """It is looked at again; and where the server is always faster, that is what is said first."""
    place = Place(Backend("sqlite", "", tmp_path / "data"), tmp_path / "data")
    desk = place.open("versions:2")
    desk.busy(12)
    replayed = verify_module._replayed
    dropped: list[int] = []

    def beside(*given: Any) -> Iterator[Any]:
        for number, found in enumerate(replayed(*given)):
            if number == 1 and len(dropped) < times:
                dropped.append(number)
                desk.busy(12, first=desk.books.seq)
            yield found

    monkeypatch.setattr(verify_module, "_replayed", beside)
    found = verify(place.folder, whole=True).problems
    desk.drop()
    assert len(found) == problems, found
    assert not found or "the server dropped the beginning of its log (server.keep)" in found[0]


def blueprint(desk: Desk) -> Blueprint:
    return Blueprint.of(desk.config, desk.books.engine.spec, FEW)


def test_a_log_that_begins_in_a_pause_is_folded_like_any(tmp_path: Path) -> None:
    """What came after the pause counts, though nobody got a task in it."""
    desk = Desk(MemoryStore(FEW), tmp_path, keeping("versions:1"), FEW)
    desk.busy(2)
    desk.tell(ev.Paused(desk.tick()))
    desk.books.save(desk.tick())
    desk.tell(ev.Resumed(desk.tick()))
    desk.enrol("idle")
    while (base := desk.store.first().snapshot) is None:
        desk.busy(1, first=desk.books.seq)
    assert base.meta["paused"]
    before = desk.books.engine.vector.copy()
    older = ev.RolledBack(desk.now, 3, 0, ("idle",), rules=0)
    as_then = desk.books.begin_rollback(older).finish(desk.books.seq + 1, desk.now).fold
    assert as_then is not None
    assert as_then.version == base.meta["version"], "an older release's order leads to what it led to"
    back_to(desk, 3, "idle")
    assert (desk.books.engine.vector == before).all()
    desk.drop()


def test_a_rollback_to_the_newest_version_leaves_it_as_it_is(place: Place) -> None:
    """Which event made it may not be in the store yet when the order comes."""
    desk = place.open("all")
    desk.work(6)
    assert desk.books.engine.version == 3
    before = desk.books.engine.vector.copy()
    back_to(desk, 3, "c1")
    assert (desk.books.engine.vector == before).all()
    desk.drop()


@pytest.mark.parametrize(
    ("strategy", "order", "error", "words"),
    [
        (ROUNDS, {}, ConfigError, "'fedavg' works in rounds"),
        (PAIRS, {"to_version": 2}, UnknownVersion, "version 2 is not published: the newest is 1"),
        (PAIRS, {"to_version": -1}, UnknownVersion, "version -1 is not published"),
        (
            PAIRS,
            {"without": ()},
            ConfigError,
            "name a client whose updates are left out",
        ),
        (PAIRS, {"without": ("c0", "ghost")}, ConfigError, "client 'ghost' is not enrolled"),
        (PAIRS, {"to_version": 1}, None, ""),
        (PAIRS, {"without": (), "everyone": True}, None, ""),
    ],
)
def test_an_order_to_go_back_that_makes_no_sense_is_refused(
    tmp_path: Path, strategy: dict[str, Any], order: dict[str, Any], error: type[Exception] | None, words: str
) -> None:
    desk = Desk(MemoryStore(FEW), tmp_path, merge([("test", {"strategy": strategy})]), FEW)
    desk.work(2)
    event = ev.RolledBack(desk.tick(), **{"to_version": 0, "to_seq": 0, "without": ("c0",), **order})
    if error is None:
        desk.books.begin_rollback(event)
    else:
        with pytest.raises(error, match=words):
            desk.books.begin_rollback(event)
    desk.drop()


def back_to(desk: Desk, version: int, without: str) -> None:
    order = ev.RolledBack(desk.tick(), version, 0, (without,))
    folding = desk.books.begin_rollback(order)
    call = Call(order, folding=folding)
    desk.books.commit([call])
    assert call.error is None, call.error
    desk.tell(ev.Released(desk.tick(), without))


@BACKENDS
def test_the_setting_may_change(place: Place) -> None:
    desk = place.open("all")
    desk.busy(30)
    assert seqs(desk.store)[0] == 1
    desk.drop()
    desk = place.open("versions:4")
    desk.busy(30, first=30)
    begin = seqs(desk.store)[0]
    assert begin > 1
    desk.drop()
    desk = place.open("all")
    desk.busy(30, first=60)
    assert seqs(desk.store)[0] == begin
    before = desk.digest
    assert desk.store.problems() == []
    desk.drop()
    desk = place.open("days:1")
    assert desk.digest == before
    desk.now += 3 * 86_400.0
    desk.busy(12, first=90)
    desk.now += 3 * 86_400.0
    desk.busy(12, first=110)
    assert seqs(desk.store)[0] > begin
    desk.drop()


@ON_DISK
def test_verify_proves_from_where_the_log_begins(on_disk: Backend, tmp_path: Path) -> None:
    place = Place(on_disk, tmp_path / "data")
    desk = place.open()
    desk.busy(50)
    begin, digest = desk.store.first(), desk.digest
    desk.close()
    database = "" if on_disk.kind == "sqlite" else on_disk.database
    found = verify(place.folder, database)
    assert (found.problems, found.state_sha256, found.version) == ((), digest, 25)
    assert found.proved_from == begin.applied_through_seq > 0
    with pytest.raises(
        DataError, match=rf"has the log from event {found.proved_from + 1} on \(server\.keep\)"
    ):
        export_run(place.folder, database, tmp_path / "run")


def test_payloads_in_files_go_with_the_last_event_that_names_them(on_disk: Backend) -> None:
    """Once they are old enough to be nobody's that is on its way: till then they wait, and go later."""
    store, keep, names = on_disk.start(), Keep.of("versions:1"), list[str]()
    assert isinstance(store, SqlStore)

    def enter(numbers: range) -> None:
        for number in numbers:
            data = bytes([number % 11]) * 1000  # of the first and of the last the same
            names.append(upload(store, data, f"u{number}"))
            store.append([replace(update(number, data), inline=None)])
            publish(store, [number], keep)

    enter(range(1, 9))
    assert trimmed(store)[0] > 1
    assert all(map(store.blobs.exists, names)), f"adopted less than {ADOPTED_S:.0f} s ago"
    enter(range(9, 13))
    store.blobs._adopted.clear()  # which was long ago
    left = trimmed(store)
    assert left[0] > 9
    kept = {names[number - 1] for number in left}
    assert names[0] in kept
    assert {name for name in names if store.blobs.exists(name)} == kept
    assert store.problems() == []
    store.close()


def test_segments_go_when_no_row_names_them(tmp_path: Path) -> None:
    store, keep = Backend("sqlite", "", tmp_path / "data").start(), Keep.of("versions:1")
    assert isinstance(store, SqliteStore)
    for number in range(1, 9):
        store.append([entry := update(number, bytes([number]) * 100_000)])
        publish(store, [number], keep)
        store._segments.close()  # each has one of its own
    left = trimmed(store)
    assert 1 < left[0] < 8
    assert sorted(int(path.stem) for path in (tmp_path / "data" / "log").iterdir()) == left
    assert bytes(store.payload(reference(entry))) == entry.inline
    assert store.problems() == []
    store.close()


LONG = (pytest.mark.prove, pytest.mark.timeout(3600))


@pytest.mark.parametrize(
    "updates", [300, pytest.param(10_000, marks=LONG), pytest.param(100_000, marks=LONG)]
)
def test_disk_and_restart_are_flat(tmp_path: Path, updates: int) -> None:
    """Rows, bytes and the events of a restart are those of the retention, whatever came before."""
    place = Place(Backend("sqlite", "", tmp_path / "data"), tmp_path / "data")
    found = []
    for part in range(3):
        desk = place.open("versions:20")
        assert desk.found.replayed <= 30
        desk.busy(updates // 3, first=part * updates)
        rows = row_counts(desk.store, schema.metadata.sorted_tables)
        assert desk.store.problems() == []
        desk.drop()
        log = sum(path.stat().st_size for path in (place.folder / "log").iterdir())
        whole = sum(path.stat().st_size for path in place.folder.rglob("*") if path.is_file())
        found.append((rows, whole - log, log))
    for rows, size, log in found:
        assert rows["events"] <= 2 * (2 * 20 + 3 * 2) * 2 + 20
        assert rows["updates"] <= 2 * (2 * 20 + 3 * 2) + 10
        assert rows["leases"] <= rows["events"]
        assert rows["model_versions"] <= 2 * 20 + 3 * 2 + 2
        assert rows["snapshots"] <= 5
        assert rows["receipts"] <= 50 + 2 * (2 * 20 + 3 * 2)
        assert size < 40 * updates + (1 << 20), "but for 32 bytes a version"
        assert log < 2 * TRIMMED_BYTES, "a segment is removed whole: one is dropped less, one is written"
