"""A bit flips, or a file is cut, in the folders of a killed server: it is found, or it is harmless."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import anabranch, answer
from torn import DATABASE, WAL, Killed, killed_server, served, try_damage

from anabranch.core.errors import LogLost, StoreCorrupt, outcome_of
from anabranch.server.restored import attest
from anabranch.server.store.base import RunInfo
from anabranch.server.store.factory import open_store
from anabranch.server.store.mark import FILE
from anabranch.server.store.segments import Segments
from anabranch.server.verify import verify


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """Once for all seeds. Rows follow with a snapshot, not with time: some events are in the log only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anabranch.server.writer.FOLLOWED_S", 3600.0)
        return killed_server(tmp_path_factory.mktemp("torn"))


@pytest.fixture
def here(killed: Killed, tmp_path: Path) -> Path:
    """Its folders, to be damaged."""
    return shutil.copytree(killed.folder, tmp_path / "here")


def flip(path: Path, place: int) -> bytes:
    """Flip a bit; returns what the file holds then."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    return bytes(data)


def check(killed: Killed, seeds: range, folder: Path, figure: Callable[[str], None]) -> None:
    trials = [try_damage(killed, seed, folder) for seed in seeds]
    found = Counter((bool(trial.verified), bool(trial.started)) for trial in trials)
    figure(
        f"{len(trials)} flips and cuts of {len(killed.files)} files: verify found "
        f"{found[True, True] + found[True, False]}, the start {found[True, True] + found[False, True]}, "
        f"{found[False, False]} were harmless to both"
    )
    assert [(trial.damage, trial.problems) for trial in trials if trial.problems] == []


def test_no_damage_is_silent(killed: Killed, tmp_path: Path, figure: Callable[[str], None]) -> None:
    check(killed, range(3 * len(killed.files) // 2), tmp_path, figure)


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_no_damage_is_silent_in_the_long_form(
    killed: Killed, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    check(killed, range(1000, 1400), tmp_path, figure)


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_a_log_that_lost_what_was_acknowledged_is_refused_and_left_alone(
    how: str, killed: Killed, here: Path
) -> None:
    log = here / killed.log
    match how:
        case "flip":
            left: bytes | None = flip(log, log.stat().st_size - 10)
        case "cut":
            left = log.read_bytes()[:-10]
            log.write_bytes(left)
        case "gone":
            left = None
            log.unlink()
    for _ in range(2):
        with pytest.raises(LogLost, match=r"events? are lost.*attest-restore") as lost, served(killed, here):
            pass
        assert outcome_of(lost.value).exit_code == 38
        # An expert may yet save what follows the damage.
        assert (log.read_bytes() if log.exists() else None) == left
    assert any("are lost" in problem for problem in verify(here / "data").problems)


def test_damage_before_the_end_of_the_log_is_found_without_the_mark(killed: Killed, here: Path) -> None:
    (here / "data" / FILE).unlink()  # as after a power cut, before it was flushed
    with sqlite3.connect(here / DATABASE) as database:
        (end,) = database.execute("SELECT max(seq) FROM events").fetchone()
    database.close()
    log = Segments(here / "data")
    info = stored_info(here)
    behind = list(log.events(log.needed(info.run_id, end), end))
    assert len(behind) > 1
    data = (here / killed.log).read_bytes()
    flip(here / killed.log, data.index(behind[0].line.encode()) + 5)
    for _ in range(2):
        with pytest.raises(LogLost, match=r"are lost.*attest-restore"), served(killed, here):
            pass
    attest(here / "data", "", None)
    with served(killed, here, authority=False) as server:
        assert server.info is not None
        assert server.info.version <= killed.version
    assert verify(here / "data").problems == ()


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_what_the_database_has_lost_is_in_the_log(how: str, killed: Killed, here: Path) -> None:
    wal = here / WAL
    if how == "flip":
        flip(wal, wal.stat().st_size // 2)
    else:
        wal.write_bytes(wal.read_bytes()[: wal.stat().st_size * 3 // 4])
    with served(killed, here) as server:
        assert server.info is not None
        assert server.info.version == killed.version
    found = verify(here / "data")
    assert (found.problems, found.model_sha256) == ((), killed.model_sha256)


def test_a_database_that_has_lost_events_alone_is_refused_and_left_alone(killed: Killed, here: Path) -> None:
    """The log has them, but not what was decided of their updates."""
    write_rows(here)
    with sqlite3.connect(here / DATABASE) as database:
        database.execute("DELETE FROM events WHERE seq > 3")
    database.close()
    left = (here / DATABASE).read_bytes()
    for _ in range(2):
        with pytest.raises(LogLost, match=r"end at event 3, but .* restore a backup"), served(killed, here):
            pass
    assert (here / DATABASE).read_bytes() == left
    assert any("end at event 3" in problem for problem in verify(here / "data").problems)


def write_rows(here: Path) -> None:
    """Have the database complete what it lacks of the log."""
    store, info = open_store("", here / "data"), stored_info(here)
    store.start(info)
    store.close()


def stored_info(here: Path) -> RunInfo:
    store = open_store("", here / "data")
    try:
        info = store.info()
        assert info is not None
        return info
    finally:
        store.close()


def test_the_operator_may_go_on_without_what_is_lost(killed: Killed, here: Path) -> None:
    flip(here / killed.log, (here / killed.log).stat().st_size - 10)
    refused = anabranch(here, "verify", "data", "--json")
    assert refused.returncode == 31
    assert "Traceback" not in refused.stderr
    said = answer(
        anabranch(here, "admin", "attest-restore", "--data-dir", "data", "--folder", "ca", "--json")
    )
    with served(killed, here) as server:
        assert server.info is not None
        assert said["version"] <= server.info.version <= killed.version
    assert verify(here / "data").problems == ()


def test_a_damaged_mark_is_not_taken_for_none(killed: Killed, here: Path) -> None:
    (here / "data" / FILE).write_bytes(b"")
    with pytest.raises(StoreCorrupt, match="attest-restore"), served(killed, here):
        pass
    attest(here / "data", "", None)
    with served(killed, here, authority=False):
        pass
    assert (here / "data" / FILE).stat().st_size > 0


def test_a_snapshot_ahead_of_the_log_is_no_start(killed: Killed, here: Path) -> None:
    (here / "data" / FILE).unlink()  # data of before there was one
    with sqlite3.connect(here / DATABASE) as database:
        (last,) = database.execute("SELECT max(applied_through_seq) FROM snapshots").fetchone()
        database.execute("DELETE FROM updates WHERE seq >= ?", (last,))
        database.execute("DELETE FROM events WHERE seq >= ?", (last,))
    database.close()
    Segments(here / "data").go_on_from(stored_info(here).run_id, last - 1)  # nor does the log have them
    with pytest.raises(LogLost, match="but a snapshot is of event"), served(killed, here):
        pass
    assert any("but a snapshot is of event" in p for p in verify(here / "data").problems)


def test_a_snapshot_that_the_log_has_forgotten_is_no_garbage(killed: Killed, here: Path) -> None:
    (here / "data" / FILE).unlink()
    with sqlite3.connect(here / DATABASE) as database:
        (newest,) = database.execute(
            "SELECT sha256 FROM snapshots ORDER BY applied_through_seq DESC LIMIT 1"
        ).fetchone()
        (seq,) = database.execute(
            "SELECT applied_through_seq FROM model_versions ORDER BY version DESC LIMIT 1 OFFSET 4"
        ).fetchone()
        for table, column in (
            ("updates", "seq"),
            ("events", "seq"),
            ("model_versions", "applied_through_seq"),
            ("snapshots", "applied_through_seq"),
        ):
            database.execute(f"DELETE FROM {table} WHERE {column} > ?", (seq,))
    database.close()
    Segments(here / "data").go_on_from(stored_info(here).run_id, seq)
    with pytest.raises(LogLost, match=newest), served(killed, here):
        pass
    assert list((here / "data" / "snapshots").glob(f"{newest}.*"))
    attest(here / "data", "", None)
    with served(killed, here, authority=False):
        pass
    assert (here / "data" / "snapshots" / f"{newest}.lost").exists()


def test_a_log_that_was_altered_after_the_newest_version_is_refused(killed: Killed, here: Path) -> None:
    write_rows(here)
    with sqlite3.connect(here / DATABASE) as database:
        row = "(SELECT max(seq) FROM events)"
        done = database.execute(
            f"UPDATE events SET record = replace(record, '\"now\":1', '\"now\":2') WHERE seq = {row}"
        )
        assert done.rowcount == 1
    database.close()
    with pytest.raises(LogLost, match="is not what was acknowledged"), served(killed, here):
        pass
    assert any("is not what was acknowledged" in p for p in verify(here / "data").problems)


def test_data_of_before_there_was_a_mark_start_and_get_one(killed: Killed, here: Path) -> None:
    (here / "data" / FILE).unlink()
    with served(killed, here) as server:
        assert server.info is not None
        assert server.info.version == killed.version
    store = open_store("", here / "data")
    assert store.mark() is not None
    store.close()
    assert verify(here / "data").problems == ()
