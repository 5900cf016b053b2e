"""A database made anew from the log beside it, where SQLite's file is lost or damaged.

All of its rows are a fold of the log, but for the run's own, which `run.json` has as well, and for operators'
tags and evaluators' metrics, which are lost. A backup of the run stands in for what the log does not have
(any more): its database is taken as it is, and the log brings what came after it.

It is made in a folder of its own, `rebuilding`, of links to the files of the log. There it is held to the
mark, which it may not begin behind, and replayed. Only then does anything of it come to the data: the mark,
the log and whatever else lies there are not touched, so that nothing is worse after a try that fails or is
killed. A snapshot of the end comes with it, so that the next start need not replay everything once more.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from sqlalchemy import insert

from anabranch.core.config.tables import Config
from anabranch.core.errors import (
    AnabranchError,
    ConfigError,
    DataError,
    LogLost,
    ManifestMismatch,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreLocked,
    on_disk,
)
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.params import digest
from anabranch.core.snapshot import VECTOR, take_changes
from anabranch.identity.files import check_owner, sync_folder
from anabranch.identity.noise_key import NOISE_KEY
from anabranch.server.backup import NAMED, check_restored, read_backup, reading
from anabranch.server.manifest import kept_manifest, read_manifest
from anabranch.server.proofs import AUTHORITIES
from anabranch.server.recovery import recover
from anabranch.server.store import revision, rows
from anabranch.server.store.base import Mark, RunInfo
from anabranch.server.store.factory import open_store
from anabranch.server.store.files import (
    ASIDE,
    REBUILDING,
    SQLITE_FILE,
    FolderLock,
    make_folder,
    sync_file,
)
from anabranch.server.store.mark import FILE as MARK
from anabranch.server.store.mark import MarkFile
from anabranch.server.store.run_note import FILE as NOTE
from anabranch.server.store.run_note import noted_run
from anabranch.server.store.schema import runs
from anabranch.server.store.segments import FOLDER as LOG
from anabranch.server.store.segments import Segments
from anabranch.server.store.snapshots import SnapshotFiles
from anabranch.server.store.sqlite import BUSY_TIMEOUT_MS, SqliteDatabase
from anabranch.server.verify import VerifyReport, verify
from anabranch.support.folders import check_folder

LOST = ".lost"  # after the name of a database that could not be read
# Not snapshots, which only bear witness, nor what those name; packs are of events that only a backup has.
_NEEDED = {LOG, "blobs", MARK, NOTE, "manifest", NOISE_KEY, AUTHORITIES}
_ENDS = ("-wal", "-shm", "-journal", "")  # the file goes last: what belongs to it may lie beside no other
_MAGIC = b"SQLite format 3\0"
# SQLite's words for a file that holds no run; others are of who is at it, whose it is, or of the disk.
_HOLDS_NONE = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR}
_HELD = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_LIMITS = replace(DEFAULT_LIMITS, free_disk_bytes_min=0)  # nothing is acknowledged here, so nothing held back

Admit = Callable[[Config], None]
Tell = Callable[[str, int], None]  # what is being done, and up to which event


def rebuild(
    data_dir: Path,
    backup: Path | None = None,
    admit: Admit | None = None,
    tell: Tell = lambda _doing, _seq: None,
) -> VerifyReport:
    """Make the database of a server's data anew, from the log and, if given, from a backup of the run.

    One that cannot be read is set aside. `admit`: hears of the run's settings before code that they name is
    run. `tell` hears how far it is. Raises `ConfigError` where there is a database that can be read, the data
    are another user's, or a backup is of another run or history; `DataError` and `LogLost` where the log
    alone does not tell the run; `StoreCorrupt` where what was made is not sound; `StoreLocked` where a server
    is at work, `StoreError`. Then the data are as they were.
    """
    _check_data(data_dir)
    staged = data_dir / REBUILDING
    with on_disk(data_dir), _named_in(data_dir, staged):
        lock = FolderLock(data_dir)
        try:
            shutil.rmtree(staged, ignore_errors=True)  # of one that was killed
            mark = _mark(data_dir)
            _check_lost(data_dir / SQLITE_FILE)
            _link(data_dir, staged)
            _begin(staged, mark, backup)
            found = _proved(staged, _seen(data_dir), admit, backup, tell)
            _take_up(staged, data_dir)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
            lock.release()
    return found


@contextmanager
def _named_in(data_dir: Path, staged: Path) -> Iterator[None]:
    """Errors name the files of the data: those of the other folder are links to them, and gone by then."""
    try:
        yield
    except AnabranchError as error:
        if str(staged) not in str(error):
            raise
        raise type(error)(str(error).replace(str(staged), str(data_dir))) from error


def _check_data(data_dir: Path) -> None:
    """Raises `DataError` unless there are data of a run, `ConfigError` where they are another user's."""
    check_folder(data_dir, "name the data_dir of a server")
    check_restored(data_dir)
    if not (Segments(data_dir).state() or (data_dir / NOTE).exists()):
        raise DataError(
            f"{data_dir} has no log of a run: name the data_dir of a server on SQLite; of a run in "
            "PostgreSQL the database itself is put back (pg_restore)"
        )
    check_owner(data_dir / MARK, data_dir / LOG)


def _mark(data_dir: Path) -> Mark:
    """How far the log was acknowledged: what is made is held to it. Raises `LogLost`, `StoreCorrupt`."""
    if (mark := MarkFile(data_dir).read()) is None:
        raise LogLost(
            f"{data_dir / MARK} is missing, which says how far the log was acknowledged: what is made could "
            "not be proved to be all of it; restore a backup"
        )
    return mark


def _check_lost(path: Path) -> None:
    """Raises `ConfigError` where there is a database that tells of a run, and as `_run_in`."""
    if (run_id := _run_in(path)) is not None:
        raise ConfigError(
            f"{path} tells of its run, {run_id}, and nothing is made anew. If it is of another run, or "
            f"damaged (`anabranch verify`), {_moved(path)}"
        )


def _run_in(path: Path) -> str | None:
    """The run that a database tells of, None where it is missing or damaged.

    Raises `StoreLocked`, `StoreError` where that cannot be seen.
    """
    # What is none is not opened: an empty file SQLite takes for a new one, and removes its log beside it.
    if not path.exists() or not _is_sqlite(path):
        return None
    try:
        with closing(reading(path)) as database:
            row = database.execute("SELECT run_id FROM runs").fetchone()
    except UnicodeDecodeError:  # a name in a damaged page, which is no error of SQLite's
        return None
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in _HOLDS_NONE:
            return None
        raise (StoreLocked if code in _HELD else StoreError)(
            f"{path} may be whole, and could not be looked at: {error}. See who has it open, whose it is, "
            f"and how the disk is; or {_moved(path)}"
        ) from error
    return None if row is None else str(row[0])


def _is_sqlite(path: Path) -> bool:
    """Whether a file begins as SQLite's do, or may: of one that cannot be seen into SQLite says why."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return True


def _moved(path: Path) -> str:
    """How a database goes out of the way, with what belongs to it, and over nothing that went before."""
    lost, there = shlex.quote(str(path.parent / ASIDE)), shlex.quote(str(path))
    return f"move it away: mkdir {lost} && mv {there}* {lost}; and back, should this fail"


# --- in a folder of its own --------------------------------------------------------------------------------


def _link(data_dir: Path, staged: Path) -> None:
    """What a replay and a proof need, without its bytes a second time where that can be had."""
    make_folder(staged)
    for source in sorted(data_dir.iterdir()):
        if source.name not in _NEEDED or source.is_symlink():
            continue
        if source.is_dir():
            for path in sorted(source.rglob("*")):
                if path.is_file():
                    target = staged / path.relative_to(data_dir)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    _linked(path, target)
        else:  # the mark is written in place
            shutil.copy2(source, staged / source.name)


def _linked(source: Path, target: Path) -> None:
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
            "the log does not begin with the run's first event (server.keep, an older release that had none, "
            "or a file of it is gone): name a backup of the run by --from"
        ) from lost
    _make_database(staged / SQLITE_FILE, info)


def _make_database(path: Path, info: RunInfo) -> None:
    database = SqliteDatabase(path)
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
    if _run_in(backup / SQLITE_FILE) != record.run_id:
        raise DataError(f"{backup / SQLITE_FILE} is missing or damaged: name another backup")
    for source, target in _lacking(backup, staged):
        shutil.copyfile(source, target)
    shutil.copyfile(backup / SQLITE_FILE, staged / SQLITE_FILE)


def _proved(
    staged: Path, seen: Mapping[int, str], admit: Admit | None, backup: Path | None, tell: Tell
) -> VerifyReport:
    """Write all rows, as a start does, and look at everything. Raises `StoreCorrupt`, `LogLost`.

    `seen`: the digests of models that were published, by version.
    """
    advice = (
        "; without a database, a backup of the run by --from may stand in for what is missing"
        if backup is None
        else "; what is damaged here and whole in the backup is taken from there, once it is moved away"
    )
    try:
        tell("writing rows from the log", 0)
        version = _replayed(staged, admit)
        _put_on_record(staged, seen, version)
        found = verify(staged, whole=True, tell=partial(tell, "proving them"))
    except ManifestMismatch as error:
        raise DataError(f"manifest/ is not of the run in {NOTE}: put both back from a backup") from error
    except (StoreCorrupt, LogLost) as error:
        raise type(error)(f"{error}{advice}; nothing was changed") from error
    if found.problems:
        listed = "\n".join(found.listed)
        raise StoreCorrupt(
            f"what the log gives is not sound, {len(found.problems)} problems{advice}; nothing was changed:\n"
            f"{listed}"
        )
    return found


def _replayed(staged: Path, admit: Admit | None) -> int:
    """All of the log has rows, and its end a snapshot; returns the version that it comes to."""
    with closing(open_store("", staged, _LIMITS)) as store:
        if (info := store.info()) is None:
            raise StoreError(f"{staged / SQLITE_FILE} was not made")
        config = Config.from_json(info.config)
        if admit is not None:
            admit(config)
        here = replace(config, server=replace(config.server, data_dir=str(staged)))
        made = recover(store, here, read_manifest(kept_manifest(staged)), here.limits)
        if made.replayed:
            store.save_snapshot(take_changes(made.engine), made.seq, made.last_now)
        return made.engine.version


def _seen(data_dir: Path) -> dict[int, str]:
    """What was published, as far as snapshots still show it: the digests of their models, by version."""
    files, found = SnapshotFiles(data_dir, DEFAULT_LIMITS), {}
    for sha256 in files.others(set()):
        with suppress(StoreCorrupt):
            snapshot = files.read(sha256)
            found[int(snapshot.meta["version"])] = digest(snapshot.arrays[VECTOR])
    return found


@contextmanager
def _made(staged: Path) -> Iterator[sqlite3.Connection]:
    """The database that was made. Raises `StoreFull`, `StoreError`."""
    path = staged / SQLITE_FILE
    try:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)) as database:
            yield database
    except sqlite3.Error as error:
        kind = StoreFull if error.sqlite_errorcode == sqlite3.SQLITE_FULL else StoreError
        raise kind(f"writing {path}: {error}; nothing was changed") from error


def _put_on_record(staged: Path, seen: Mapping[int, str], version: int) -> None:
    """What was published is on record before `verify` looks: the replay's own word would prove nothing.

    `version`: what the log comes to. Raises `LogLost` where more was published.
    """
    if (newest := max(seen, default=0)) > version:
        raise LogLost(f"there is a snapshot of version {newest}, and the log ends with version {version}")
    with _made(staged) as database:
        for number, sha256 in seen.items():
            database.execute("UPDATE model_versions SET sha256 = ? WHERE version = ?", (sha256, number))


# --- and back ----------------------------------------------------------------------------------------------


def _take_up(staged: Path, data_dir: Path) -> None:
    """What is proved comes to the data: first files that lack there, which count for nothing without it."""
    with _made(staged) as database:
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
