"""`verify` goes on from where it last proved, and proves all again when it is told to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from desks import Desk, settings
from sqlalchemy import select
from stores import LIMITS, ON_DISK, Backend, sqlite_first

from anabranch.core.snapshot import Snapshot
from anabranch.identity.heads import HASH_BYTES
from anabranch.server.backup import back_up
from anabranch.server.export import export_run
from anabranch.server.store import ending, schema
from anabranch.server.store.sql import SqlStore
from anabranch.server.verify import VerifyReport, verify
from anabranch.testing.store import snapshot

EVERY = {"snapshot_every_versions": 2}


class Place:
    """A data folder whose server works a while and is stopped."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        self.backend, self.folder, self.done = backend, folder, 0

    @property
    def record(self) -> Path:
        return self.folder / "proved" / "record.json"

    def desk(self, keep: str = "all") -> Desk:
        config = settings(server={**EVERY, "keep": keep})
        return Desk(self.backend.open(LIMITS), self.folder, config, LIMITS)

    def work(self, updates: int, keep: str = "all") -> Desk:
        desk = self.desk(keep)
        desk.busy(updates, first=self.done)
        self.done += updates
        desk.close()
        return desk

    def verify(self, whole: bool = False, ca_sha256: str = "") -> VerifyReport:
        database = "" if self.backend.kind == "sqlite" else self.backend.database
        return verify(self.folder, database, ca_sha256, whole)


on_disk = sqlite_first()


@pytest.fixture
def place(on_disk: Backend, tmp_path: Path) -> Place:
    return Place(on_disk, tmp_path / "data")


def test_it_goes_on_from_where_it_last_proved(place: Place) -> None:
    desk = place.work(20)
    first = place.verify()
    assert (first.problems, first.proved_from, first.proved_at) == ((), 0, 0.0)
    assert first.state_sha256 == desk.digest
    desk = place.work(9)
    second = place.verify()
    assert (second.problems, second.proved_from) == ((), first.events)
    assert second.proved_at > 0
    assert (second.state_sha256, second.version) == (desk.digest, desk.books.engine.version)
    again = place.verify()
    assert (again.problems, again.proved_from, again.events) == ((), second.events, second.events)
    whole = place.verify(whole=True)
    assert (whole.problems, whole.proved_from, whole.state_sha256) == ((), 0, desk.digest)


def test_a_snapshot_that_its_server_drops_meanwhile_is_no_damage(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.work(8)
    reader, desk = place.backend.open(), place.desk()
    assert isinstance(reader, SqlStore)
    read, before = reader._snapshots.read, place.backend.snapshots()

    def late(sha256: str) -> Snapshot:
        """Between the look at the rows and the look at the files the server goes on."""
        monkeypatch.undo()
        desk.busy(20, first=8)
        return read(sha256)

    monkeypatch.setattr(reader._snapshots, "read", late)
    assert reader.problems() == []
    assert set(before).isdisjoint(place.backend.snapshots())
    place.backend.lose(place.backend.snapshots()[0])
    (problem,) = reader.problems()
    assert "cannot be read" in problem
    reader.close()
    desk.drop()


@ON_DISK
def test_a_change_after_what_was_proved_is_found_and_nothing_is_noted(place: Place) -> None:
    place.work(10)
    place.verify()
    noted = place.record.read_bytes()
    place.work(6)
    place.backend.execute("UPDATE events SET record = replace(record, 'c1', 'c2') WHERE seq = 31")
    found = place.verify()
    assert found.problems
    assert place.record.read_bytes() == noted


@ON_DISK
def test_a_receipt_that_is_lost_after_it_was_proved_is_no_damage_for_ever(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was proved has it still, and the state of the run has it no more."""
    keep = "versions:20"
    place.work(100, keep)
    proved = place.verify()
    assert (proved.problems, proved.proved_from > 0) == ((), True), "the log begins late"
    place.backend.execute("UPDATE receipts SET receipt = '[]' WHERE number = 1")
    desk = place.work(4, keep)
    assert "receipt 1 is damaged, and no snapshot is without it" in caplog.text
    assert json.loads(place.record.read_bytes())["seq"] == proved.events, "it holds still"
    if place.backend.kind == "sqlite":
        assert back_up(place.folder, tmp_path / "backup").proved
    found = place.verify()
    assert (found.problems, found.state_sha256) == ((), desk.digest)
    desk = place.work(2, keep)
    again = place.verify()
    assert (again.problems, again.proved_from) == ((), found.events), "and this one is noted"
    assert again.state_sha256 == desk.digest


def test_a_snapshot_that_its_server_writes_meanwhile_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of a version that the log did not have when it was looked at."""
    place = Place(Backend("sqlite", "", tmp_path / "data"), tmp_path / "data")
    place.work(8)
    reader, desk = place.backend.open(), place.desk()
    assert isinstance(reader, SqlStore)
    ahead = ending.files_ahead

    def late(*given: Any) -> list[str]:
        """Between the look at the rows and the look at the folder the server goes on."""
        monkeypatch.undo()
        path = reader._snapshots.path(desk.store.write_snapshot(snapshot(9)))
        found = ahead(*given)
        path.unlink()
        return found

    monkeypatch.setattr(ending, "files_ahead", late)
    assert reader.problems() == []
    written = reader._snapshots.path(desk.store.write_snapshot(snapshot(9)))
    (problem,) = reader.problems()
    assert f"{written} is of a version that the log does not have" in problem
    reader.close()
    desk.drop()


@pytest.mark.parametrize(
    ("table", "column", "which"),
    [
        ("client_records", "record", 0),
        ("client_records", "record", 1),
        ("client_records", "capability", 2),
        ("receipts", "receipt", 1),
        ("receipts", "receipt", 2),
    ],
)
def test_damaged_rows_of_any_snapshot_are_found(place: Place, table: str, column: str, which: int) -> None:
    """Though a start, and the proof, go by another one, or by the log."""
    place.work(40, keep="versions:4")
    assert place.verify().problems == ()
    mark = f"SELECT applied_through_seq FROM snapshots ORDER BY 1 LIMIT 1 OFFSET {which}"
    place.backend.execute(f"UPDATE {table} SET {column} = '{{}}' WHERE applied_through_seq = ({mark})")
    for whole in (False, True):
        problems = place.verify(whole).problems
        assert any("a row of a snapshot is damaged" in problem for problem in problems)


def test_links_of_versions_that_are_gone_lead_to_the_first_that_is_there(place: Place) -> None:
    """By them a device follows the chain that was away since then."""
    desk = place.work(60, keep="versions:4")
    assert desk.store.versions()[0].version > 9
    assert place.verify().problems == ()
    reader = place.backend.open()
    assert isinstance(reader, SqlStore)
    with reader._reading() as connection:
        links = connection.execute(select(schema.old_links.c.links)).scalar_one()
    reader.close()
    for at in (0, 5 * HASH_BYTES + 7, len(links) - 1):
        flipped = bytearray(links)
        flipped[at] ^= 1
        place.backend.execute("UPDATE old_links SET links = :links", links=bytes(flipped))
        (problem,) = place.verify().problems
        assert "do not lead to the head of version" in problem
    place.backend.execute("UPDATE old_links SET links = :links", links=links)
    assert place.verify().problems == ()


def test_the_log_that_was_proved_may_not_change(place: Place) -> None:
    place.work(10)
    place.verify()
    place.backend.execute("UPDATE events SET record = replace(record, 'c1', 'c2') WHERE seq = 4")
    found = place.verify()
    assert found.problems
    assert found.proved_from == 0


def test_payloads_that_were_proved_are_read_again_by_the_whole_proof(place: Place) -> None:
    place.work(10)
    place.verify()
    place.backend.execute("UPDATE updates SET payload = :data WHERE seq = 3", data=b"x" * 32)
    assert place.verify().problems == ()
    assert place.verify(whole=True).problems


@ON_DISK
def test_a_record_that_cannot_be_read_is_none(place: Place) -> None:
    place.work(10)
    place.verify()
    noted = json.loads(place.record.read_text())
    for broken in (
        "",
        "{}",
        "[]",
        json.dumps({**noted, "snapshot": "00" * 32}),
        json.dumps({**noted, "seq": 9}),
    ):
        place.record.write_text(broken)
        found = place.verify()
        assert (found.problems, found.proved_from) == ((), 0)
    assert place.verify().proved_from == noted["seq"]


@ON_DISK
def test_signatures_that_were_not_asked_for_are_not_proved(place: Place) -> None:
    place.work(6)
    assert place.verify().problems == ()
    found = place.verify(ca_sha256="ab" * 32)
    assert found.problems
    assert found.proved_from == 0


@ON_DISK
def test_it_goes_on_over_a_log_that_was_shortened(place: Place) -> None:
    place.work(20, keep="versions:4")
    first = place.verify()
    place.work(4, keep="versions:4")
    assert place.verify().proved_from == first.events
    place.work(40, keep="versions:4")
    later = place.verify()
    assert later.problems == ()
    assert later.proved_from > first.events, "what was proved is behind the log: it begins later now"


def test_a_version_of_any_page_is_held_to_the_record(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more versions than are looked up at once are in memory."""
    monkeypatch.setattr(SqlStore.versions, "__defaults__", (0, 4))
    desk = place.work(30)
    newest = desk.books.engine.version
    assert newest > 9
    first = place.verify()
    assert (first.problems, first.version) == ((), newest)
    assert place.verify().proved_from == first.events, "the hash of the log is that of then"
    changed = {1, 4, 5, 9, newest}
    for version in changed:
        place.backend.execute(f"UPDATE model_versions SET sha256 = 'ab' || sha256 WHERE version = {version}")
    told = " ".join(place.verify(whole=True).problems)
    assert set(map(int, re.findall(r"version (\d+) has the digest \w+ in the replay", told))) == changed


def test_a_report_has_what_was_reported_of_versions_on_any_page(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqlStore.versions, "__defaults__", (0, 4))
    place.work(30)
    store = place.backend.open(LIMITS)
    info = store.info()
    assert info is not None
    store.start(info)
    reported = {version: {"accuracy": version / 100} for version in (0, 1, 4, 5, 9)}
    for version, metrics in reported.items():
        store.add_metrics(version, metrics, 1.0)
    store.close()
    database = "" if place.backend.kind == "sqlite" else place.backend.database
    assert export_run(place.folder, database, tmp_path / "run").metrics == reported
