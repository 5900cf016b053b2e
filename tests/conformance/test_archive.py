"""What a log drops is in the archive: run, proof and report are those of a log that was kept whole."""

from __future__ import annotations

import json
import zipfile
from itertools import islice
from pathlib import Path

import pytest
from desks import Desk, settings
from stores import LIMITS, ON_DISK, Backend

from anabranch.core import events as ev
from anabranch.core.errors import ConfigError, DataError, StoreCorrupt
from anabranch.server.books import Call
from anabranch.server.export import export_run
from anabranch.server.store.archive import Archive, ArchivedEvent
from anabranch.server.store.factory import open_data, open_store
from anabranch.server.store.files import SQLITE_FILE
from anabranch.server.store.sql import SqlStore
from anabranch.server.verify import verify

SERVER = {"snapshot_every_versions": 2, "snapshot_every_updates": 0, "snapshot_every_events": 0}


class Kept:
    """A data folder whose log is short, and its archive."""

    def __init__(self, backend: Backend, folder: Path, archive: Path) -> None:
        self.backend, self.folder, self.archive = backend, folder, archive

    @property
    def database(self) -> str:
        return "" if self.backend.kind == "sqlite" else self.backend.database

    def open(self) -> Desk:
        store = open_store(self.database, self.folder, LIMITS, archive=self.archive)
        return Desk(store, self.folder, settings(server={**SERVER, "keep": "versions:4"}))

    @property
    def files(self) -> list[Path]:
        return sorted(self.archive.glob("*/*.zip"))


@pytest.fixture
def kept(on_disk: Backend, tmp_path: Path) -> Kept:
    return Kept(on_disk, tmp_path / "data", tmp_path / "archive")


def whole(kept: Kept) -> list[str]:
    """All records from the first on, as text."""
    store = open_data(kept.database, kept.folder, kept.archive)
    found = [str(record) for _, record in store.records()]
    store.close()
    return found


def test_the_whole_run_is_proved_and_told(kept: Kept, tmp_path: Path) -> None:
    desk = kept.open()
    desk.busy(25)
    desk.store.add_metrics(2, {"accuracy": 0.5}, 1.0)
    assert desk.store.versions()[0].version > 2
    desk.close()
    desk = kept.open()
    desk.busy(25, first=25)
    events, digest = desk.books.seq, desk.digest
    assert desk.store.first().applied_through_seq > 0
    desk.close()
    found = verify(kept.folder, kept.database, archive=kept.archive)
    assert (found.problems, found.state_sha256, found.events) == ((), digest, events)
    assert (found.proved_from, found.updates) == (0, 50)
    told = export_run(kept.folder, kept.database, tmp_path / "run", kept.archive)
    assert (told.events, told.metrics) == (events, {2: {"accuracy": 0.5}})
    with pytest.raises(DataError, match=r"\(--archive\)"):
        export_run(kept.folder, kept.database, tmp_path / "other")


@pytest.mark.parametrize(
    ("on_disk", "read"),
    [
        *(("sqlite", read) for read in (1, 30, 70, 100)),
        ("postgresql", 30),
        *(pytest.param("postgresql", read, marks=pytest.mark.prove) for read in (1, 70, 100)),
    ],
    indirect=["on_disk"],
)
def test_a_log_that_is_read_while_it_goes_to_the_archive_has_no_gap(kept: Kept, read: int) -> None:
    """Wherever the reader is by then: in the archive, at its end, or among what goes next."""
    desk = kept.open()
    desk.busy(50)
    store = open_data(kept.database, kept.folder, kept.archive)
    records = store.records()
    found = [seq for seq, _ in islice(records, read)]
    begins, end = desk.store.first().applied_through_seq, desk.books.seq
    desk.busy(30, first=50)
    assert desk.store.first().applied_through_seq > begins
    found += [seq for seq, _ in records]
    store.close()
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= end
    desk.close()


@ON_DISK
def test_a_rollback_among_what_has_gone_is_told_as_it_was(kept: Kept) -> None:
    """Which updates it had left out is asked of what was decided of them."""
    desk = kept.open()
    desk.busy(4)
    order = ev.RolledBack(desk.tick(), 1, 0, ("c1",))
    folding = desk.books.begin_rollback(order)
    while folding.advance(10):
        pass
    call = Call(order, folding=folding)
    desk.books.commit([call])
    assert call.error is None, call.error
    desk.tell(ev.Released(desk.tick(), "c1"))
    desk.busy(40, first=100)
    digest, events = desk.digest, desk.books.seq
    kinds = [record["kind"] for _, record in desk.store.records()]
    assert "rolled_back" not in kinds
    desk.close()
    found = verify(kept.folder, kept.database, archive=kept.archive)
    assert (found.problems, found.state_sha256, found.events) == ((), digest, events)


@ON_DISK
def test_a_crash_before_the_log_lets_go_changes_nothing(kept: Kept) -> None:
    """The file is written, the log has it all still; it is written again, though it ends elsewhere."""
    desk = kept.open()
    desk.busy(20)
    lines = whole(kept)
    store = desk.store
    assert isinstance(store, SqlStore)
    begins = store.first().applied_through_seq
    desk.busy(2, first=20)
    first = next(seq for seq, _ in store.records())
    ahead = kept.files[0].parent / f"{first:012d}-{first + 9:012d}.zip"
    ahead.write_bytes(b"of a server that was killed, or of a log that was taken back to a backup")
    desk.busy(20, first=30)
    assert store.first().applied_through_seq > begins
    desk.close()
    assert ahead.with_suffix(".old").exists() or not ahead.exists()
    assert whole(kept)[: len(lines)] == lines
    assert verify(kept.folder, kept.database, archive=kept.archive).problems == ()


@ON_DISK
@pytest.mark.parametrize("damage", ["flip", "lost", "cut"])
def test_damage_is_named(on_disk: Backend, tmp_path: Path, damage: str) -> None:
    kept = Kept(on_disk, tmp_path / "data", tmp_path / "archive")
    desk = kept.open()
    desk.busy(40)
    desk.close()
    assert len(kept.files) > 2
    hurt = kept.files[1]
    data = hurt.read_bytes()
    if damage == "lost":
        hurt.unlink()
    elif damage == "cut":
        hurt.write_bytes(data[: len(data) // 2])
    else:
        with zipfile.ZipFile(hurt) as archive:
            at = archive.getinfo("events.jsonl").header_offset + 60
        hurt.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    found = verify(kept.folder, kept.database, archive=kept.archive)
    assert any("has no event" in p if damage == "lost" else str(hurt) in p for p in found.problems)


@ON_DISK
@pytest.mark.parametrize(("gone", "said"), [(False, "Not a directory"), (True, "put it back, or make it")])
def test_what_cannot_be_archived_stays_in_the_log(
    gone: bool, said: str, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    desk = kept.open()
    folder = next(kept.archive.iterdir())
    folder.rmdir()
    if not gone:
        folder.write_bytes(b"in the way")
    desk.busy(30)
    assert next(seq for seq, _ in desk.store.records()) == 1
    assert "nothing was dropped of the log: server.archive" in caplog.text
    assert said in caplog.text
    folder.unlink(missing_ok=True)
    folder.mkdir()
    desk.books._trims_at = 0.0  # as if the pause were over
    desk.busy(10, first=30)
    assert next(seq for seq, _ in desk.store.records()) > 1
    desk.close()
    assert verify(kept.folder, kept.database, archive=kept.archive).problems == ()


def test_a_folder_that_cannot_be_one_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"server\.archive.*name a folder that can be written"):
        Kept(Backend("sqlite", "", tmp_path / "data"), tmp_path / "data", tmp_path / "file").open()


def test_another_archive_is_none_of_this_run(tmp_path: Path) -> None:
    kept = Kept(Backend("sqlite", "", tmp_path / "data"), tmp_path / "data", tmp_path / "archive")
    desk = kept.open()
    desk.busy(30)
    desk.close()
    assert (kept.folder / SQLITE_FILE).exists()
    assert list(Archive(tmp_path / "nowhere", "run").events()) == []
    with pytest.raises((DataError, StoreCorrupt), match=r"name the server\.archive of this run"):
        verify(kept.folder, archive=tmp_path / "elsewhere")


def test_each_course_that_a_log_has_left_stays(tmp_path: Path) -> None:
    """Taken back to a backup twice: of the three times that the events were written none is overwritten."""
    archive = Archive(tmp_path, "run").prepared()
    for course in ("a", "b", "c"):
        record = {"kind": "released", "now": 1.0, "client_id": course}
        archive.write([ArchivedEvent(seq, record, None) for seq in (1, 2)], lambda _: b"")
    archive.close()
    found = {}
    for path in archive.folder.iterdir():
        with zipfile.ZipFile(path) as file:
            found[path.name] = json.loads(file.read("events.jsonl").splitlines()[0])["record"]["client_id"]
    name = "000000000001-000000000002"
    assert found == {f"{name}.old": "a", f"{name}.old-2": "b", f"{name}.zip": "c"}
