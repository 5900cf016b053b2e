"""A database made anew from the log beside it, where SQLite's file is lost or damaged.

All of its rows are a fold of the log, but for the run's own, which `run.json` has as well, and for operators'
tags and evaluators' metrics, which are lost. A backup of the run stands in for what the log does not have
(any more): its database is taken as it is, and the log brings what came after it.

What is made counts only where it is proved to be the run that was acknowledged, by the mark and a replay;
else it goes again, and all is as it was.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from sqlalchemy import URL, insert

from anabranch.core.config.tables import Config
from anabranch.core.errors import (
    ConfigError,
    DataError,
    FolderMissing,
    LogLost,
    StoreCorrupt,
    StoreError,
    StoreLocked,
    on_disk,
)
from anabranch.server.backup import NAMED, check_restored, read_backup
from anabranch.server.manifest import kept_manifest, read_manifest
from anabranch.server.recovery import recover
from anabranch.server.store import revision, rows
from anabranch.server.store.base import Mark, RunInfo
from anabranch.server.store.database import Database
from anabranch.server.store.factory import SQLITE_FILE, open_store
from anabranch.server.store.files import FolderLock, make_folder, sync_file, sync_folder
from anabranch.server.store.mark import FILE as MARK
from anabranch.server.store.mark import MarkFile
from anabranch.server.store.run_note import FILE as NOTE
from anabranch.server.store.run_note import noted_run
from anabranch.server.store.schema import runs
from anabranch.server.store.segments import Segments
from anabranch.server.verify import VerifyReport, verify

LOST = ".lost"  # after the name of a database that could not be read
STAGED = f"{SQLITE_FILE}.tmp"
_ENDS = ("", "-wal", "-shm")

Admit = Callable[[Config], None]


def rebuild(data_dir: Path, backup: Path | None = None, admit: Admit | None = None) -> VerifyReport:
    """Make the database of a server's data anew, from the log and, if given, from a backup of the run.

    One that cannot be read is set aside. `admit`: hears of the run's settings before code that they name is
    run. Raises `ConfigError` where there is a database that can be read, or a backup is of another run;
    `DataError` and `LogLost` where the log alone does not tell the run; `StoreCorrupt` where what was made is
    not sound; `StoreLocked` where a server is at work.
    """
    if not data_dir.is_dir():
        raise FolderMissing(f"{data_dir} is not there: name the data_dir of a server")
    check_restored(data_dir)
    with on_disk(data_dir), _locked(data_dir):
        _check_lost(data_dir)
        staged, aside = data_dir / STAGED, (data_dir / SQLITE_FILE).exists()
        _remove(staged)
        try:
            _stage(data_dir, staged, backup)
            sync_file(staged)
            _move(data_dir / SQLITE_FILE, data_dir / f"{SQLITE_FILE}{LOST}")
            staged.rename(data_dir / SQLITE_FILE)
            sync_folder(data_dir)
        finally:
            _remove(staged)
    try:
        return _proved(data_dir, admit)
    except StoreLocked:  # a server was quicker, and looks at the same
        raise
    except BaseException as error:
        with suppress(StoreLocked), _locked(data_dir):
            _remove(data_dir / SQLITE_FILE)
            if aside:
                _move(data_dir / f"{SQLITE_FILE}{LOST}", data_dir / SQLITE_FILE)
        if backup is None and isinstance(error, StoreCorrupt):
            raise StoreCorrupt(
                f"{error}; with a backup of the run (--from) less of the log is needed"
            ) from error
        raise


@contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    lock = FolderLock(data_dir)
    try:
        yield
    finally:
        lock.release()


def _stage(data_dir: Path, staged: Path, backup: Path | None) -> None:
    if not Segments(data_dir).state():
        raise DataError(f"{data_dir} has no log of a run: name the data_dir of a server on SQLite")
    mark = _mark(data_dir)
    if backup is None:
        _from_note(data_dir, mark, staged)
    else:
        _from_backup(data_dir, mark, staged, backup)


def _check_lost(data_dir: Path) -> None:
    """Raises `ConfigError` where there is a database that tells of a run."""
    path = data_dir / SQLITE_FILE
    if not path.exists():
        return
    try:
        with closing(open_store("", data_dir)) as store:
            store.info()
    except (LogLost, StoreCorrupt):
        return
    raise ConfigError(
        f"{path} tells of its run, and nothing is made anew. If it is damaged (`anabranch verify`), move it "
        f"away: mv {path} {path}{LOST}"
    )


def _mark(data_dir: Path) -> Mark:
    """How far the log was acknowledged: what is made is held to it. Raises `LogLost`, `StoreCorrupt`."""
    if (mark := MarkFile(data_dir).read()) is None:
        raise LogLost(
            f"{data_dir / MARK} is missing, which says how far the log was acknowledged: what is made could "
            "not be proved to be all of it; restore a backup"
        )
    return mark


def _from_note(data_dir: Path, mark: Mark, staged: Path) -> None:
    """A database with nothing but the run: the log has its first event, and all that follows."""
    if (info := noted_run(data_dir)) is None:
        raise DataError(
            f"{data_dir / NOTE} is missing, as older releases wrote none: name a backup of the run by --from"
        )
    _check_run(info, mark, data_dir / NOTE)
    try:
        Segments(data_dir).needed(info.run_id, 0)
    except LogLost as lost:
        raise LogLost(
            f"{data_dir / 'log'} does not begin with the run's first event (server.keep, or a file is gone): "
            "name a backup of the run by --from"
        ) from lost
    database = Database(URL.create("sqlite", database=str(staged)))
    try:
        database.open(writes=True)
        with database.writing() as connection:
            revision.bring_up(connection)
            connection.execute(insert(runs), rows.run_row(info))
    finally:
        database.close()


def _from_backup(data_dir: Path, mark: Mark, staged: Path, backup: Path) -> None:
    """The database of a backup, with the files that it names and that have gone since."""
    record = read_backup(backup)
    if record.run_id != mark.run_id:
        raise ConfigError(f"{backup} is of run {record.run_id}, and {data_dir} of run {mark.run_id}")
    Segments(data_dir).needed(record.run_id, record.events)  # it goes on from there, or an error says so
    for folder in NAMED:
        for source in sorted((backup / folder).rglob("*")):
            target = data_dir / source.relative_to(backup)
            if source.is_file() and not target.exists():
                make_folder(target.parent)
                _copied(source, target)
    _copied(backup / SQLITE_FILE, staged)


def _check_run(info: RunInfo, mark: Mark, path: Path) -> None:
    if info.run_id != mark.run_id:
        raise DataError(f"{path} is of run {info.run_id}, and the log beside it of run {mark.run_id}")


def _copied(source: Path, target: Path) -> None:
    """A copy of a file for its owner alone, whole or not there by its name, and durable."""
    unfinished = target.with_name(f"{target.name}.tmp")
    unfinished.unlink(missing_ok=True)
    unfinished.touch(mode=0o600)
    shutil.copyfile(source, unfinished)
    sync_file(unfinished)
    unfinished.rename(target)
    sync_folder(target.parent)


def _move(database: Path, target: Path) -> None:
    for end in _ENDS:
        path = database.with_name(database.name + end)
        if path.exists():
            os.replace(path, target.with_name(target.name + end))


def _remove(database: Path) -> None:
    for end in _ENDS:
        database.with_name(database.name + end).unlink(missing_ok=True)


def _proved(data_dir: Path, admit: Admit | None) -> VerifyReport:
    """Write all rows, as a start does, and look at everything. Raises `StoreCorrupt`, `LogLost`."""
    with closing(open_store("", data_dir)) as store:
        if (info := store.info()) is None:
            raise StoreError(f"{data_dir / SQLITE_FILE} was not made")
        config = Config.from_json(info.config)
        if admit is not None:
            admit(config)
        here = replace(config, server=replace(config.server, data_dir=str(data_dir)))
        recover(store, here, read_manifest(kept_manifest(data_dir)), here.limits)
    found = verify(data_dir)
    if found.problems:
        listed = "\n".join(f"- {problem}" for problem in found.problems[:20])
        raise StoreCorrupt(
            f"{data_dir}: what the log gives is not sound, {len(found.problems)} problems:\n{listed}"
        )
    return found
