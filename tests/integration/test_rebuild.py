"""`admin rebuild`: a lost database is made anew from the log, where that is proved to be all of it."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import anabranch
from wire import Served, server_config

from anabranch.core.config.tables import Config
from anabranch.core.errors import (
    AnabranchError,
    ConfigError,
    DataError,
    FolderMissing,
    LogLost,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreLocked,
)
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.units import Member, UnitGroup
from anabranch.server.backup import RESTORING, back_up, put_back
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.rebuild import LOST, rebuild
from anabranch.server.store.factory import open_store
from anabranch.server.store.files import REBUILDING, SQLITE_FILE
from anabranch.server.store.mark import FILE as MARK
from anabranch.server.store.run_note import FILE as NOTE
from anabranch.server.store.run_note import note_run, noted_run
from anabranch.server.store.snapshots import SnapshotFiles
from anabranch.server.verify import VerifyReport, verify

UPDATES, LIVES = 7, 6


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Of a model with units: its layout names them, in an order that counts."""
    groups = (UnitGroup("units", 30, (Member("w", 0),)),)
    return write_manifest(tmp_path / "model", "test", {"w": np.zeros((30, 10), np.float32)}, groups)


def lived(
    data: Path,
    manifest: Manifest,
    updates: int = UPDATES,
    inline: int = 1 << 20,
    strategy: Mapping[str, Any] | None = None,
    privacy: Mapping[str, Any] | None = None,
    **server: object,
) -> Config:
    """A server's data after some updates, as a kill may leave them but for the lock."""
    tables = {"server": {"snapshot_every_versions": 2, **server}}
    config = server_config(data, **tables, strategy=strategy or {}, privacy=privacy or {})
    with Served(config, manifest, replace(DEFAULT_LIMITS, inline_bytes_max=inline)) as served:
        device = served.device()
        for value in range(updates):
            device.work(float(value + 1))
        served.close()
    return config


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Nothing of this process can write beyond that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def lost(data: Path) -> None:
    for end in ("", "-wal", "-shm"):
        (data / f"{SQLITE_FILE}{end}").unlink(missing_ok=True)


def files(data: Path) -> dict[str, bytes]:
    """All that lies there: to see that nothing was changed."""
    return {
        str(path.relative_to(data)): path.read_bytes()
        for path in sorted(data.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


@pytest.mark.parametrize("inline", [1 << 20, 100], ids=["log", "blobs"])
def test_a_run_is_whole_by_its_log_alone(tmp_path: Path, manifest: Manifest, inline: int) -> None:
    data = tmp_path / "data"
    config = lived(data, manifest, inline=inline)
    before = verify(data, whole=True)
    lost(data)
    told: list[tuple[str, int]] = []
    made = rebuild(data, tell=lambda *said: told.append(said))
    assert told[0] == ("writing rows from the log", 0)
    assert told[-1] == ("proving them", before.events)
    assert (made.problems, made.version, made.updates) == ((), UPDATES, UPDATES)
    after = verify(data, whole=True)
    assert (after.problems, after.state_sha256) == ((), before.state_sha256)
    assert (after.run_id, after.events) == (before.run_id, before.events)
    with Served(config, manifest) as served:
        assert served.info is not None
        assert (served.info.run_id, served.info.version) == (before.run_id, UPDATES)
        assert served.device().work().version == UPDATES + 1


def test_a_disk_without_room_for_another_name_is_said(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, however many files there are."""
    data = tmp_path / "data"
    lived(data, manifest, inline=100)
    lost(data)
    before, copy = files(data), shutil.copy2

    def no_room(source: Path, target: Path) -> None:
        if Path(target).parent.name != REBUILDING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        copy(source, target)

    monkeypatch.setattr(os, "link", no_room)
    monkeypatch.setattr(shutil, "copy2", no_room)
    with pytest.raises(StoreFull, match=r"no space left on the disk: make room"):
        rebuild(data)
    assert files(data) == before


def test_what_cannot_be_read_is_set_aside(tmp_path: Path, manifest: Manifest) -> None:
    data = tmp_path / "data"
    lived(data, manifest)
    lost(data)
    (data / SQLITE_FILE).write_bytes(b"no database" * 400)
    (data / REBUILDING / "log").mkdir(parents=True)
    (data / REBUILDING / "log" / "000001.log").write_bytes(b"of a rebuild that was killed")
    assert rebuild(data).version == UPDATES
    assert (data / f"{SQLITE_FILE}{LOST}").read_bytes() == b"no database" * 400
    assert not (data / REBUILDING).exists()


def test_a_start_clears_away_a_rebuild_that_was_killed(tmp_path: Path, manifest: Manifest) -> None:
    data = tmp_path / "data"
    lived(data, manifest)
    (data / REBUILDING / "log").mkdir(parents=True)
    lived(data, manifest, updates=1)
    assert not (data / REBUILDING).exists()


def test_nothing_that_was_set_aside_is_written_over(tmp_path: Path, manifest: Manifest) -> None:
    """Nor does what belonged to a lost file lie beside the new one: SQLite would play it into that."""
    data = tmp_path / "data"
    lived(data, manifest)
    for name in (f"{SQLITE_FILE}{LOST}", f"{SQLITE_FILE}{LOST}-2"):
        lost(data)
        (data / SQLITE_FILE).write_bytes(name.encode() * 99)
        for end in ("-wal", "-journal"):
            (data / f"{SQLITE_FILE}{end}").write_bytes(f"{end} of {name}".encode())
        rebuild(data)
        assert not (data / f"{SQLITE_FILE}-journal").exists()
        assert (data / name).read_bytes() == name.encode() * 99
        assert (data / f"{name}-wal").read_bytes() == f"-wal of {name}".encode()
    back_up(data, tmp_path / "copy")
    assert not list((tmp_path / "copy").glob(f"*{LOST}*"))


def test_a_replay_to_another_model_is_none(tmp_path: Path, manifest: Manifest) -> None:
    """By another program, say: a snapshot shows what was published. Its log is sound in itself."""
    data, other = tmp_path / "data", tmp_path / "other"
    lived(data, manifest)
    lived(other, manifest, updates=UPDATES + 2)
    with closing(sqlite3.connect(other / SQLITE_FILE)) as rows:
        (newest,) = rows.execute("SELECT sha256 FROM snapshots ORDER BY version DESC").fetchone()
    taken = SnapshotFiles(other, DEFAULT_LIMITS).read(newest)
    shown = replace(taken, meta={**taken.meta, "version": UPDATES - 1})
    lost(data)
    SnapshotFiles(data, DEFAULT_LIMITS).write(shown)
    before = files(data)
    with pytest.raises(StoreCorrupt, match=f"version {UPDATES - 1} has the digest"):
        rebuild(data)
    assert files(data) == before


def test_code_that_a_run_names_wants_a_word(tmp_path: Path, manifest: Manifest) -> None:
    data = tmp_path / "data"
    lived(data, manifest)
    lost(data)
    before, heard = files(data), []

    def refuse(config: Config) -> None:
        heard.append(config.run.name)
        raise ConfigError("not this code")

    with pytest.raises(ConfigError, match="not this code"):
        rebuild(data, admit=refuse)
    assert (heard, files(data)) == (["run"], before)


def test_a_backup_stands_in_for_what_the_log_has_dropped(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `server.keep` the log lacks its first events; what came since the backup is not lost."""
    monkeypatch.setattr("anabranch.server.store.segments.TRIMMED_BYTES", 1)
    data, copy = tmp_path / "data", tmp_path / "copy"
    for _ in range(LIVES):  # each ends with a snapshot
        lived(data, manifest, updates=4, keep="versions:2")
        if not (tmp_path / "early").exists():
            back_up(data, tmp_path / "early")
    back_up(data, copy)
    lived(data, manifest, updates=3, keep="versions:2")
    before = verify(data)
    lost(data)
    as_left = files(data)
    with pytest.raises(LogLost, match=r"first event.*--from"):
        rebuild(data)
    with pytest.raises(LogLost, match="does not go on from there"):
        rebuild(data, tmp_path / "early")
    assert files(data) == as_left
    made = rebuild(data, copy)
    assert (made.version, made.state_sha256, made.events) == (
        4 * LIVES + 3,
        before.state_sha256,
        before.events,
    )
    assert verify(data).problems == ()


def test_payloads_that_are_dropped_are_missed(tmp_path: Path, manifest: Manifest) -> None:
    """The log has all its events still, and the files of large payloads are gone."""
    data = tmp_path / "data"
    lived(data, manifest, inline=100)
    next(path for path in (data / "blobs").rglob("*") if path.is_file()).unlink()
    lost(data)
    before = files(data)
    with pytest.raises(StoreCorrupt, match="--from") as told:
        rebuild(data)
    assert REBUILDING not in str(told.value), "that is gone by now"
    assert files(data) == before


def test_a_backup_stands_in_for_the_note_of_older_releases(tmp_path: Path, manifest: Manifest) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    lived(data, manifest)
    back_up(data, copy)
    lived(data, manifest, updates=2)
    lost(data)
    (data / NOTE).unlink()
    with pytest.raises(DataError, match=r"run\.json is missing.*--from"):
        rebuild(data)
    assert rebuild(data, copy).version == UPDATES + 2
    lived(data, manifest, updates=1)
    assert noted_run(data) is not None, "a start writes it"


def _renoted(**changed: Any) -> Callable[[Path], object]:
    """A note that is whole, of another run than the log's."""

    def spoil(data: Path) -> None:
        info = noted_run(data)
        assert info is not None
        note_run(data, replace(info, **changed))

    return spoil


def _damaged(data: Path) -> None:
    text = (data / NOTE).read_text(encoding="utf-8")
    (data / NOTE).write_text(text.replace('"name": "', '"name": "x'), encoding="utf-8")


def _in_postgresql(data: Path) -> None:
    shutil.rmtree(data / "log")
    (data / NOTE).unlink()


def _shorter(data: Path) -> None:
    *_, newest = sorted((data / "log").glob("*.log"))
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size - 50)


SPOILT: dict[str, tuple[Callable[[Path], object], type[AnabranchError], str]] = {
    "other settings": (_renoted(created_at=1.0), LogLost, "not what was acknowledged"),
    "other run": (_renoted(run_id="another"), DataError, "another.*run"),
    "other model": (_renoted(initial_sha256="00" * 32), DataError, "manifest/ is not of the run"),
    "damaged note": (_damaged, DataError, r"data/run\.json is damaged"),
    "half a note": (lambda data: (data / NOTE).write_text("{"), DataError, r"run\.json is damaged"),
    "shorter log": (_shorter, LogLost, "data/anabranch.db: .* acknowledged up to event .* by --from"),
    "no mark": (lambda data: (data / MARK).unlink(), LogLost, "acknowledged is missing.*restore a backup"),
    "no log": (lambda data: shutil.rmtree(data / "log"), LogLost, "acknowledged up to event"),
    "PostgreSQL's": (_in_postgresql, DataError, "no log of a run"),
    "half a restore": (lambda data: (data / RESTORING).mkdir(), DataError, "restore` again"),
}


@pytest.mark.parametrize("number", range(len(SPOILT)), ids=list(SPOILT))
def test_what_is_not_proved_does_not_count(tmp_path: Path, manifest: Manifest, number: int) -> None:
    """Whether the database is gone or, every second time, damaged."""
    spoil, error, said = list(SPOILT.values())[number]
    data = tmp_path / "data"
    lived(data, manifest)
    lost(data)
    if number % 2:
        (data / SQLITE_FILE).write_bytes(b"no database" * 400)
    spoil(data)
    before = files(data)
    with pytest.raises(error, match=said):
        rebuild(data)
    assert files(data) == before


@pytest.mark.parametrize(
    ("since", "error", "inline"), [(1, ConfigError, 100), (9, LogLost, 1 << 20)], ids=["longer", "shorter"]
)
def test_a_backup_of_another_course_of_the_run(
    tmp_path: Path, manifest: Manifest, inline: int, since: int, error: type[AnabranchError]
) -> None:
    """A run that was put back has the same name and other events: what was acknowledged of it is not lost.

    The backup is of what the run had come to before, and goes further than these data, or less far.
    """
    first, data = tmp_path / "first", tmp_path / "data"
    lived(first, manifest, inline=inline)
    back_up(first, tmp_path / "early")
    lived(first, manifest, updates=4, inline=inline)
    back_up(first, tmp_path / "late")
    put_back(tmp_path / "early", data, None)
    lived(data, manifest, updates=since, inline=inline)
    state = verify(data, whole=True).state_sha256
    lost(data)
    before = files(data)
    with pytest.raises(error):
        rebuild(data, tmp_path / "late")
    assert files(data) == before
    assert rebuild(data, tmp_path / "early").state_sha256 == state


def test_a_backup_does_not_mend_what_it_lacks_as_well(tmp_path: Path, manifest: Manifest) -> None:
    """The server itself would go on from a snapshot: so that is not to be taken from it."""
    data = tmp_path / "data"
    config = lived(data, manifest, inline=100)
    back_up(data, tmp_path / "copy")
    lived(data, manifest, updates=2, inline=100)
    for blobs in (data / "blobs", tmp_path / "copy" / "blobs"):
        min(path for path in blobs.rglob("*") if path.is_file()).unlink(missing_ok=True)
    kept = data / f"{SQLITE_FILE}{LOST}"
    (data / SQLITE_FILE).rename(kept)
    lost(data)
    before = files(data)
    with pytest.raises(StoreCorrupt, match="nothing was changed"):
        rebuild(data, tmp_path / "copy")
    assert files(data) == before
    kept.rename(data / SQLITE_FILE)
    with Served(config, manifest) as served:
        assert served.info is not None
        assert served.info.version == UPDATES + 2


def test_where_nothing_is_made(tmp_path: Path, manifest: Manifest) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    lived(data, manifest)
    with pytest.raises(FolderMissing):
        rebuild(tmp_path / "nowhere")
    lived(other, manifest, updates=1)
    back_up(other, tmp_path / "copy")
    lost(data)
    with pytest.raises(ConfigError, match=r"is of run .* and .* of run"):
        rebuild(data, tmp_path / "copy")
    config = server_config(tmp_path / "alive")
    with Served(config, manifest) as served:
        served.device().work()
        with pytest.raises(StoreLocked):
            rebuild(tmp_path / "alive")
    assert verify(tmp_path / "alive").problems == ()


def test_a_database_of_another_run_is_moved_away_as_the_error_says(
    tmp_path: Path, manifest: Manifest
) -> None:
    """With its log, which beside another file of that name would be played into that."""
    data, other = tmp_path / "my data", tmp_path / "other"
    lived(data, manifest)
    lived(other, manifest, updates=1)
    lost(data)
    shutil.copy(other / SQLITE_FILE, data)
    (data / f"{SQLITE_FILE}-wal").write_bytes(b"of the other run's")
    run = noted_run(other)
    assert run is not None
    with pytest.raises(ConfigError, match=f"tells of its run, {run.run_id}, .* of another run") as told:
        rebuild(data)
    command = str(told.value).partition("move it away: ")[2].partition("; and back")[0]
    subprocess.run(command, shell=True, check=True)
    assert {path.name for path in (data / "lost").iterdir()} >= {
        SQLITE_FILE,
        f"{SQLITE_FILE}-wal",
    }
    assert rebuild(data).version == UPDATES


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_file_whose_beginning_cannot_be_read_is_left_to_sqlite(
    number: int, tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which says whether there is a run in it, or why that cannot be seen, with what to do."""
    data, real = tmp_path / "data", Path.open
    lived(data, manifest)

    def opened(path: Path, *more: Any) -> Any:
        if path.name == SQLITE_FILE:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *more)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(ConfigError, match="tells of its run"):
        rebuild(data)


def test_a_file_that_cannot_be_seen_is_not_taken_for_lost(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags and metrics may be in it."""
    monkeypatch.setattr("anabranch.server.backup.BUSY_TIMEOUT_MS", 1)
    data = tmp_path / "data"
    lived(data, manifest)
    kept = (data / SQLITE_FILE).read_bytes()
    (in_the_way := data / f"{SQLITE_FILE}-wal").unlink(missing_ok=True)
    in_the_way.mkdir()
    with pytest.raises(StoreError, match=r"may be whole.*unable to open"):
        rebuild(data)
    in_the_way.rmdir()
    with (
        files_of_at_most(16 << 10),
        pytest.raises(StoreError, match=r"may be whole.*disk I/O error.*how the"),
    ):
        rebuild(data)  # a disk without room for the index of its log, say
    assert (data / SQLITE_FILE).read_bytes() == kept
    with closing(sqlite3.connect(data / SQLITE_FILE, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode=DELETE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreLocked, match="may be whole"):
            rebuild(data)
    assert not list(data.glob(f"*{LOST}*"))


def test_a_database_with_names_that_are_no_text_is_made_anew(tmp_path: Path, manifest: Manifest) -> None:
    """Python decodes what SQLite says of them, and raises an error of its own."""
    data = tmp_path / "data"
    lived(data, manifest)
    with closing(sqlite3.connect(data / SQLITE_FILE, isolation_level=None)) as database:
        database.execute("PRAGMA writable_schema = ON")
        database.execute(
            "UPDATE sqlite_schema SET name = CAST(x'ff' AS TEXT), sql = 'CREATE' WHERE name = 'tags'"
        )
    assert rebuild(data).version == UPDATES


def test_a_look_at_an_empty_file_leaves_its_log(tmp_path: Path, manifest: Manifest) -> None:
    """SQLite's own, which may have all that the file lacks: tags, metrics."""
    data = tmp_path / "data"
    lived(data, manifest)
    lost(data)
    (data / SQLITE_FILE).touch()
    (data / f"{SQLITE_FILE}-wal").write_bytes(b"what was not moved into the file yet")
    _damaged(data)
    before = files(data)
    with pytest.raises(DataError):
        rebuild(data)
    assert files(data) == before


def test_another_users_data_are_left_to_that_user(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server could not open root's file, nor root's lock."""
    data = tmp_path / "data"
    lived(data, manifest)
    lost(data)
    (data / "lock").unlink()
    owner = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: owner + 1)
        with pytest.raises(ConfigError, match=f"belongs to uid {owner}.*as that user"):
            rebuild(data)
    assert not (data / "lock").exists()
    assert rebuild(data).version == UPDATES


def test_a_run_without_events(tmp_path: Path, manifest: Manifest) -> None:
    """Its server names the command, though there is no log yet."""
    data = tmp_path / "data"
    config = server_config(data)
    with Served(config, manifest):
        pass
    lost(data)
    assert not list((data / "log").iterdir())
    with pytest.raises(LogLost, match="admin rebuild"), Served(config, manifest):
        pass
    assert rebuild(data).version == 0
    with Served(config, manifest) as served:
        assert served.device().work().version == 1


def test_no_room_is_held_back(tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watermark is for what is acknowledged, and the run's may be lower than the usual one."""
    data = tmp_path / "data"
    lived(data, manifest)
    lost(data)
    monkeypatch.setattr("anabranch.server.store.files.disk_bytes", lambda _: (1 << 20, 1 << 30))
    assert rebuild(data).version == UPDATES


def test_what_was_proved_and_cannot_be_written(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last: a full disk says no more than that."""
    monkeypatch.setattr("anabranch.server.rebuild.BUSY_TIMEOUT_MS", 1)
    data = tmp_path / "data"
    lived(data, manifest)
    lost(data)
    before = files(data)
    with ExitStack() as stack:

        def held(staged: Path, **asked: Any) -> VerifyReport:
            found = verify(staged, **asked)
            other = stack.enter_context(closing(sqlite3.connect(staged / SQLITE_FILE, isolation_level=None)))
            other.execute("BEGIN IMMEDIATE")
            return found

        monkeypatch.setattr("anabranch.server.rebuild.verify", held)
        with pytest.raises(StoreError, match="is locked; nothing was changed"):
            rebuild(data)
    assert files(data) == before


def test_the_next_start_goes_on_from_a_snapshot(tmp_path: Path, manifest: Manifest) -> None:
    data = tmp_path / "data"
    config = lived(data, manifest)
    lost(data)
    made = rebuild(data)
    with closing(open_store("", data)) as store:
        assert store.load().applied_through_seq == made.events
    with Served(config, manifest) as served:
        assert served.device().work().version == UPDATES + 1


@pytest.mark.parametrize("memory", ["ram", "disk"])
def test_what_a_strategy_remembers_of_devices(tmp_path: Path, manifest: Manifest, memory: str) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    ace = {"name": "ace", "memory": memory}
    lived(data, manifest, strategy=ace)
    back_up(data, copy)
    lived(data, manifest, updates=2, strategy=ace)
    state = verify(data, whole=True).state_sha256
    for backup in (None, copy):
        lost(data)
        shutil.rmtree(data / "shelf", ignore_errors=True)
        assert rebuild(data, backup).state_sha256 == state
    lived(data, manifest, updates=1, strategy=ace)
    assert verify(data, whole=True).problems == ()


def test_a_private_run_has_its_noise_again(tmp_path: Path, manifest: Manifest) -> None:
    data = tmp_path / "data"
    privacy = {"clip": 1.0, "noise": 1.0, "participations": 100}
    lived(data, manifest, privacy=privacy)
    state = verify(data, whole=True).state_sha256
    lost(data)
    assert rebuild(data).state_sha256 == state
    lived(data, manifest, updates=1, privacy=privacy)
    assert verify(data, whole=True).problems == ()


def test_a_backup_may_lack_what_came_of_its_last_event(tmp_path: Path, manifest: Manifest) -> None:
    """Taken within a second of it: its version is in no row yet, and a snapshot that came later is sound."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    lived(data, manifest)
    state = verify(data, whole=True).state_sha256
    back_up(data, copy)
    with closing(sqlite3.connect(copy / SQLITE_FILE)) as rows, rows:
        rows.execute("DELETE FROM model_versions WHERE version = ?", (UPDATES,))
        ((taken,),) = rows.execute(
            "DELETE FROM snapshots WHERE version = ? RETURNING sha256", (UPDATES,)
        ).fetchall()
        SnapshotFiles(copy, DEFAULT_LIMITS).path(taken).unlink()
        rows.execute(
            "UPDATE updates SET state = 'received', verdict = NULL, weight = NULL, applied_version = NULL "
            "WHERE applied_version = ?",
            (UPDATES,),
        )
    lost(data)
    assert rebuild(data, copy).state_sha256 == state


def test_a_snapshot_of_what_the_log_has_lost(tmp_path: Path, manifest: Manifest) -> None:
    """Behind the mark, as a power cut may leave it: what was published is known by its snapshot."""
    data, early = tmp_path / "data", tmp_path / "early"
    lived(data, manifest)
    shutil.copytree(data, early)
    lived(data, manifest, updates=1)
    shutil.copytree(data / "snapshots", early / "snapshots", dirs_exist_ok=True)
    lost(early)
    before = files(early)
    with pytest.raises(LogLost, match=f"snapshot of version {UPDATES + 1}"):
        rebuild(early)
    assert files(early) == before


def test_a_backup_that_is_damaged_is_named(tmp_path: Path, manifest: Manifest) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    lived(data, manifest)
    back_up(data, copy)
    lost(data)
    before = files(data)
    for spoil in (lambda path: path.write_bytes(b"no database" * 400), lambda path: path.unlink()):
        spoil(copy / SQLITE_FILE)
        with pytest.raises(DataError, match=r"copy/anabranch\.db is missing or damaged"):
            rebuild(data, copy)
    assert files(data) == before


def test_a_damaged_file_names_the_command(tmp_path: Path, manifest: Manifest) -> None:
    """To restore a backup would lose what came since."""
    data = tmp_path / "data"
    config = lived(data, manifest)
    lost(data)
    (data / SQLITE_FILE).write_bytes(b"no database" * 400)
    with pytest.raises(StoreCorrupt, match="admin rebuild"), Served(config, manifest):
        pass


def test_the_error_names_the_command_and_the_command_does_it(tmp_path: Path, manifest: Manifest) -> None:
    data = tmp_path / "data"
    config = lived(data, manifest)
    lost(data)
    with pytest.raises(LogLost, match="admin rebuild"), Served(config, manifest):
        pass
    done = anabranch(tmp_path, "admin", "rebuild", "--data-dir", "data", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["version"] == UPDATES
