"""Clients and receipts are rows beside the snapshots, which are as small as what is live, and load whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from desks import Desk, failing, settings
from stores import BACKENDS, LIMITS, Backend, row_counts, sqlite_first

from anabranch.core import events as ev
from anabranch.core.errors import StoreFull
from anabranch.core.model.params import digest
from anabranch.core.model.updates import Capability
from anabranch.core.snapshot import restore, state_digest, take_changes, take_snapshot
from anabranch.server.store import schema
from anabranch.server.store.base import Store

FORGETFUL = replace(LIMITS, receipts_max=7)
NEVER = settings(
    server={"snapshot_every_versions": 0, "snapshot_every_updates": 0, "snapshot_every_events": 0}
)


class Place:
    """A data folder, whatever its store, whose server is stopped and started again."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        self.backend, self.folder = backend, folder

    def open(self) -> Desk:
        return Desk(self.backend.open(FORGETFUL), self.folder, NEVER, FORGETFUL)


on_disk = sqlite_first()


@pytest.fixture
def place(backend: Backend, tmp_path: Path) -> Place:
    return Place(backend, tmp_path / "data")


def restored(desk: Desk, store: Store) -> str:
    """The digest of the newest good snapshot, by itself."""
    snapshot, engine = store.load().snapshot, desk.books.engine
    assert snapshot is not None
    kept = restore(snapshot, engine.spec, engine.strategy, engine.settings, engine.broadcast, engine.planner)
    return state_digest(kept)


@BACKENDS
def test_every_snapshot_loads_as_the_state_it_was_taken_of(place: Place) -> None:
    desk = place.open()
    for turn in range(6):
        desk.work(9, clients=4 + turn, first=100 * turn)
        desk.enrol("c1", examples=turn)
        desk.books.save(desk.now)
        assert restored(desk, desk.store) == desk.digest, f"snapshot {turn}"
    assert desk.books.engine.ledger.receipts.keys() == {f"u-t{n}" for n in range(502, 509)}
    before = desk.digest
    desk.drop()
    again = place.open()
    assert (again.found.replayed, again.digest) == (0, before)
    again.drop()


@BACKENDS
def test_a_restart_between_snapshots_and_one_without_any(place: Place) -> None:
    desk = place.open()
    desk.work(11)
    desk.drop()
    for turn in range(1, 5):
        desk = place.open()
        desk.work(5, clients=6, first=100 * turn)
        if turn % 2:
            desk.books.save(desk.now)
            desk.work(3, clients=9, first=100 * turn + 50)
        before = desk.digest
        desk.drop()
        again = place.open()
        assert again.digest == before
        again.drop()


def test_older_snapshots_are_what_they_were(place: Place) -> None:
    """The newest one is torn, then the one before: what was known then is read, not what is known now."""
    desk, digests = place.open(), []
    for turn in range(3):
        desk.work(8, clients=5, first=100 * turn)
        desk.books.save(desk.now)
        digests.append(desk.digest)
    desk.drop()
    for lost in range(2):
        place.backend.damage("snapshot")
        again = place.open()
        assert again.found.replayed > 0
        assert again.digest == digests[-1]
        assert restored(again, again.store) == digests[-2 - lost]
        again.drop()
        if place.backend.memory is not None:
            del place.backend.memory.books.snapshots[-1]
        elif not lost:
            place.backend.lose(place.backend.snapshots()[-1])
    again = place.open()
    again.work(6, clients=7, first=900)
    again.books.save(again.now)
    assert restored(again, again.store) == again.digest
    again.drop()


def test_a_snapshot_that_fails_takes_its_changes_to_the_next(place: Place) -> None:
    desk = place.open()
    desk.work(5)
    failing(desk.store, StoreFull("no room"))
    with pytest.raises(StoreFull):
        desk.books.save(desk.now)
    desk.work(4, first=100)
    desk.books.save(desk.now)
    assert restored(desk, desk.store) == desk.digest
    desk.drop()


def test_the_log_answers_for_an_update_that_the_engine_has_forgotten(place: Place) -> None:
    desk = place.open()
    desk.enrol("early")
    task = desk.ask("early", "early-task")
    answered = desk.push(task, 0.5).receipt
    desk.work(9)
    assert "u-early-task" not in desk.books.engine.ledger.receipts
    before, logged = desk.digest, desk.books.seq
    again = desk.push(task, 0.5)
    assert (again.receipt, again.duplicate) == (answered, True)
    assert (desk.digest, desk.books.seq) == (before, logged)
    desk.drop()


def test_a_snapshot_puts_the_digest_of_a_large_model_on_record(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is worked out beside the file, and is in the store once the snapshot is named."""
    monkeypatch.setattr("anabranch.server.books.DIGEST_BYTES_MAX", 0)
    desk = place.open()
    desk.work(4)
    desk.books.project()
    assert [row.sha256 for row in desk.store.versions()] == [None] * 2
    desk.books.save(desk.now)
    assert [row.sha256 for row in desk.store.versions()] == [None, digest(desk.books.engine.vector)]
    desk.drop()


def test_a_snapshot_of_before_goes_on_as_rows(place: Place) -> None:
    """As an earlier release has left it: all in one file."""
    desk = place.open()
    desk.work(20, clients=8)
    desk.books.project()
    desk.store.save_snapshot(take_snapshot(desk.books.engine), desk.books.seq, desk.now)
    before = desk.digest
    desk.drop()
    again = place.open()
    assert (again.found.replayed, again.digest) == (0, before)
    again.work(1, clients=8, first=100)
    again.books.save(again.now)
    assert restored(again, again.store) == again.digest
    again.drop()


def test_a_snapshot_is_as_small_as_what_is_live_and_what_changed(place: Place) -> None:
    desk = place.open()
    desk.tell(*(ev.Enrolled(desk.tick(), f"device-{number}", Capability()) for number in range(600)))
    desk.work(12, clients=3)
    desk.books.save(desk.now)
    desk.push(desk.ask("device-7", "only-one"), 0.5)
    taken = take_changes(desk.books.engine)
    assert taken.rows is not None
    assert list(taken.rows.clients) == ["device-7"]
    assert [(r.update_id, answers) for r, answers in taken.rows.receipts] == [("u-only-one", True)]
    assert taken.rows.enrolled == []
    assert len(json.dumps(taken.meta)) < 2_000
    assert len(json.dumps(take_snapshot(desk.books.engine).meta)) > 60_000
    desk.drop()


def test_rows_that_no_snapshot_reads_go(on_disk: Backend, tmp_path: Path) -> None:
    """Twelve snapshots of five clients: rows of three snapshots, and the receipts that the engine has."""
    place = Place(on_disk, tmp_path / "data")
    desk = place.open()
    for turn in range(12):
        desk.work(5, clients=5, first=100 * turn)
        desk.books.save(desk.now)
    counts = row_counts(desk.store, (schema.enrolments, schema.client_records, schema.receipts))
    assert counts["enrolments"] == 5
    assert counts["client_records"] == 15
    assert counts["receipts"] == 7 + 2 * 5
    assert restored(desk, desk.store) == desk.digest
    desk.drop()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE client_records SET record = replace(record, '\"accepted\": 2', '\"accepted\": 3')",
        "DELETE FROM client_records WHERE client_id = 'c1'",
        "UPDATE receipts SET receipt = replace(receipt, 'held', 'published')",
        "DELETE FROM receipts WHERE number = 3",
        "UPDATE enrolments SET client_id = 'nobody' WHERE place = 1",
    ],
)
def test_damaged_rows_are_found_and_the_log_has_it_all(on_disk: Backend, tmp_path: Path, damage: str) -> None:
    place = Place(on_disk, tmp_path / "data")
    desk = place.open()
    desk.work(6)
    desk.books.save(desk.now)
    before = desk.digest
    desk.drop()
    on_disk.execute(damage)
    again = place.open()
    assert again.found.replayed == again.books.seq > 0
    assert again.digest == before
    again.drop()
