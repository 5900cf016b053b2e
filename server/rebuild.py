"""A database made anew from the log beside it, where SQLite's file is lost or damaged.

All of its rows are a fold of the log, but for the run's own, which `run.json` has as well, and for operators'
tags and evaluators' metrics, which are lost. A backup of the run stands in for what the log does not have
(any more): its database is taken as it is, and the log brings what came after it.

It is made in a folder of its own, `rebuilding`, of links to the files of the log. There it is held to the
mark, which it may not begin behind, and replayed. Only then does anything of it come to the data: the mark,
the log and whatever else lies there are not touched, so that nothing is worse after a try that fails or is
killed.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, insert

from anabranch.core.config.tables import Config
from anabranch.core.errors import (
    ConfigError,
    DataError,
    FolderMissing,
    LogLost,
    ManifestMismatch,
    StoreCorrupt,
    StoreError,
    on_disk,
)
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.params import digest
from anabranch.core.snapshot import VECTOR
from anabranch.identity.noise_key import NOISE_KEY
from anabranch.server.backup import NAMED, check_restored, read_backup
from anabranch.server.manifest import kept_manifest, read_manifest
from anabranch.server.proofs import AUTHORITIES
from anabranch.server.recovery import recover
from anabranch.server.store import revision, rows
from anabranch.server.store.base import Mark, RunInfo
from anabranch.server.store.database import Database
from anabranch.server.store.factory import SQLITE_FILE, open_store
from anabranch.server.store.files import REBUILDING, FolderLock, make_folder, sync_file, sync_folder
from anabranch.server.store.mark import FILE as MARK
from anabranch.server.store.mark import MarkFile
from anabranch.server.store.run_note import FILE as NOTE
from anabranch.server.store.run_note import noted_run
from anabranch.server.store.schema import runs
from anabranch.server.store.segments import FOLDER as LOG
from anabranch.server.store.segments import Segments
from anabranch.server.store.snapshots import SnapshotFiles
from anabranch.server.verify import VerifyReport, verify

LOST = ".lost"  # after the name of a database that could not be read
_NEEDED = {*NAMED, MARK, NOTE, "manifest", NOISE_KEY, AUTHORITIES}
_ENDS = ("-wal", "-shm", "-journal", "")  # the file goes last: what belongs to it may lie beside no other

Admit = Callable[[Config], None]


def rebuild(data_dir: Path, backup: Path | None = None, admit: Admit | None = None) -> VerifyReport:
    """Make the database of a server's data anew, from the log and, if given, from a backup of the run.

    One that cannot be read is set aside. `admit`: hears of the run's settings before code that they name is
    run. Raises `ConfigError` where there is a database that can be read, or a backup is of another run or
    history; `DataError` and `LogLost` where the log alone does not tell the run; `StoreCorrupt` where what
    was made is not sound; `StoreLocked` where a server is at work. Then the data are as they were.
    """
    if not data_dir.is_dir():
        raise FolderMissing(f"{data_dir} is not there: name the data_dir of a server")
    check_restored(data_dir)
    staged = data_dir / REBUILDING
    with on_disk(data_dir):
        lock = FolderLock(data_dir)
        try:
            shutil.rmtree(staged, ignore_errors=True)  # of one that was killed
            _check_lost(data_dir)
            _link(data_dir, staged)
            _begin(staged, _mark(data_dir), backup)
            found = _proved(staged, admit, backup)
            _take_up(staged, data_dir)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
            lock.release()
    return found


def _check_lost(data_dir: Path) -> None:
    """Raises `ConfigError` where there is a database that tells of a run."""
    path = data_dir / SQLITE_FILE
    if not Segments(data_dir).state():
        raise DataError(
            f"{data_dir} has no log of a run: name the data_dir of a server on SQLite; of a run in "
            "PostgreSQL the database itself is put back (pg_restore)"
        )
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as database:
            if not database.execute("SELECT run_id FROM runs").fetchall():
                return
    except sqlite3.Error:
        return
    raise ConfigError(
        f"{path} tells of its run, and nothing is made anew. If it is damaged (`anabranch verify`), move it "
        f"away: mv {path} {path}{LOST}; and back, should this fail"
    )


def _mark(data_dir: Path) -> Mark:
    """How far the log was acknowledged: what is made is held to it. Raises `LogLost`, `StoreCorrupt`."""
    if (mark := MarkFile(data_dir).read()) is None:
        raise LogLost(
            f"{data_dir / MARK} is missing, which says how far the log was acknowledged: what is made could "
            "not be proved to be all of it; restore a backup"
        )
    return mark


# --- in a folder of its own --------------------------------------------------------------------------------


def _link(data_dir: Path, staged: Path) -> None:
    """What a replay and a proof need, without its bytes a second time where that can be had."""
    make_folder(staged)
    for source in sorted(data_dir.iterdir()):
        if source.name not in _NEEDED or source.is_symlink():
            continue
        if source.is_dir():
            shutil.copytree(source, staged / source.name, copy_function=_linked)
        else:  # the mark is written in place
            shutil.copy2(source, staged / source.name)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _lacking(there: Path, here: Path) -> Iterator[tuple[Path, Path]]:
    """Files that one folder has and another lacks, each with its place there: of the log first."""
    for folder in (LOG, *(name for name in NAMED if name != LOG)):
        for source in sorted((there / folder).rglob("*")):
            target = here / source.relative_to(there)
            if source.is_file() and not target.exists():
                make_folder(target.parent)
                yield source, target


def _begin(staged: Path, mark: Mark, backup: Path | None) -> None:
    """The database that the log is replayed into."""
    if backup is None:
        _from_note(staged, mark)
    else:
        _from_backup(staged, mark, backup)


def _from_note(staged: Path, mark: Mark) -> None:
    """One with nothing but the run: the log has its first event, and all that follows."""
    if (info := noted_run(staged)) is None:
        raise DataError(
            f"{NOTE} is missing, as older releases wrote none: name a backup of the run by --from"
        )
    if info.run_id != mark.run_id:
        raise DataError(f"{NOTE} is of run {info.run_id}, and the log beside it of run {mark.run_id}")
    try:
        Segments(staged).needed(info.run_id, 0)
    except LogLost as lost:
        raise LogLost(
            "the log does not begin with the run's first event (server.keep, or a file of it is gone): "
            "name a backup of the run by --from"
        ) from lost
    _make_database(staged / SQLITE_FILE, info)


def _make_database(path: Path, info: RunInfo) -> None:
    database = Database(URL.create("sqlite", database=str(path)))
    try:
        database.open(writes=True)
        with database.writing() as connection:
            revision.bring_up(connection)
            connection.execute(insert(runs), rows.run_row(info))
    finally:
        database.close()


def _from_backup(staged: Path, mark: Mark, backup: Path) -> None:
    """The database of a backup, with the files that it names and that have gone since.

    It may not go beyond the mark: then nothing that is replayed would come to it, and be held to it.
    """
    record = read_backup(backup)
    if record.run_id != mark.run_id:
        raise ConfigError(f"{backup} is of run {record.run_id}, and these data of run {mark.run_id}")
    if record.events > mark.seq:
        raise ConfigError(
            f"{backup} has {record.events} events, and these data were acknowledged up to event {mark.seq}: "
            "it is not a backup of them, but of what came later, or of another course of the run; put it "
            "back by itself (`anabranch admin restore`)"
        )
    try:
        Segments(staged).needed(record.run_id, record.events)
    except LogLost as lost:
        raise LogLost(
            f"{backup} ends with event {record.events}, and the log does not go on from there (server.keep "
            "has dropped it, or a file is gone): name a later one, or put it back (`anabranch admin restore`)"
        ) from lost
    for source, target in _lacking(backup, staged):
        shutil.copyfile(source, target)
    shutil.copyfile(backup / SQLITE_FILE, staged / SQLITE_FILE)


def _proved(staged: Path, admit: Admit | None, backup: Path | None) -> VerifyReport:
    """Write all rows, as a start does, and look at everything. Raises `StoreCorrupt`, `LogLost`."""
    advice = (
        "; a backup of the run by --from may stand in for what is missing"
        if backup is None
        else "; what is damaged here and whole in the backup is taken from there, once it is moved away"
    )
    try:
        with closing(open_store("", staged)) as store:
            if (info := store.info()) is None:
                raise StoreError(f"{staged / SQLITE_FILE} was not made")
            config = Config.from_json(info.config)
            if admit is not None:
                admit(config)
            here = replace(config, server=replace(config.server, data_dir=str(staged)))
            known = _seen(staged)
            recover(store, here, read_manifest(kept_manifest(staged)), here.limits)
        _put_on_record(staged, known)
        found = verify(staged, whole=True)
    except ManifestMismatch as error:
        raise DataError(f"manifest/ is not of the run in {NOTE}: put both back from a backup") from error
    except StoreCorrupt as error:
        raise StoreCorrupt(f"{error}{advice}; nothing was changed") from error
    if found.problems:
        listed = "\n".join(found.listed)
        raise StoreCorrupt(
            f"what the log gives is not sound, {len(found.problems)} problems{advice}; nothing was changed:\n"
            f"{listed}"
        )
    return found


def _seen(staged: Path) -> dict[int, str]:
    """What was published, as far as snapshots still show it: the digests of their models, by version."""
    files, found = SnapshotFiles(staged, DEFAULT_LIMITS), {}
    for sha256 in files.others(set()):
        with suppress(StoreCorrupt):
            snapshot = files.read(sha256)
            found[int(snapshot.meta["version"])] = digest(snapshot.arrays[VECTOR])
    return found


def _put_on_record(staged: Path, known: dict[int, str]) -> None:
    """What was published is on record before `verify` looks: the replay's own word would prove nothing."""
    with closing(sqlite3.connect(staged / SQLITE_FILE)) as database, database:
        for version, sha256 in known.items():
            database.execute("UPDATE model_versions SET sha256 = ? WHERE version = ?", (sha256, version))


# --- and back ----------------------------------------------------------------------------------------------


def _take_up(staged: Path, data_dir: Path) -> None:
    """What is proved comes to the data: first files that lack there, which count for nothing without it."""
    with closing(sqlite3.connect(staged / SQLITE_FILE, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=DELETE")  # one file
    sync_file(staged / SQLITE_FILE)
    for source, target in _lacking(staged, data_dir):
        sync_file(source)
        source.rename(target)
        sync_folder(target.parent)
    lost = _free_name(data_dir)
    for end in _ENDS:
        if (path := data_dir / f"{SQLITE_FILE}{end}").exists():
            path.rename(data_dir / f"{lost}{end}")
    (staged / SQLITE_FILE).rename(data_dir / SQLITE_FILE)
    sync_folder(data_dir)


def _free_name(data_dir: Path) -> str:
    """Of what is set aside: nothing that was set aside before is written over."""
    name, number = f"{SQLITE_FILE}{LOST}", 1
    while any((data_dir / f"{name}{end}").exists() for end in _ENDS):
        number += 1
        name = f"{SQLITE_FILE}{LOST}-{number}"
    return name
