"""A server's data copied while it serves, and put back elsewhere.

    TO/backup.json   what it is a copy of; the rest is a data directory, as a server would find it

The mark is read first, then the database as of one moment, then the log from there on, and the files that
both name. So the copy has all that was acknowledged before it began, and every file that it needs. Nothing of
the server is locked: readers do not hold up a writer in SQLite, and files are named by what they hold.
One that went in the meantime, with old events or an old snapshot, is of no use to a newer database: that is
copied again then.

What a copy does without: uploads under way, which devices send again, and models that were encoded for
downloads, which are made again; and `lost/`, a database that was moved out of the way. The authority's folder
is none of the data.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path

from anabranch.core.content import SHA256, ContentHash, algorithm_of
from anabranch.core.errors import (
    ConfigError,
    DataError,
    LogLost,
    StoreCorrupt,
    StoreError,
    StoreFull,
    on_disk,
)
from anabranch.core.limits import DEFAULT_LIMITS, MIB
from anabranch.core.plain import from_kept
from anabranch.identity.authority import Authority, authority_exists
from anabranch.identity.files import check_owner, sync_folder, write_private
from anabranch.identity.noise_key import NOISE_KEY
from anabranch.server.restored import BACKUP, Restored, attest, refuse_private
from anabranch.server.store import mark as marks
from anabranch.server.store import revision
from anabranch.server.store.base import Entry
from anabranch.server.store.blobs import BlobStore
from anabranch.server.store.ending import check_alone
from anabranch.server.store.factory import open_store
from anabranch.server.store.files import (
    ASIDE,
    LOCK,
    REBUILDING,
    SQLITE_FILE,
    FolderLock,
    free_bytes,
    make_folder,
    open_file,
    sqlite_address,
    sync_file,
)
from anabranch.server.store.mark import MarkFile
from anabranch.server.store.packs import PackPlace, Packs
from anabranch.server.store.rows import names_by_blake3
from anabranch.server.store.segments import Segments
from anabranch.server.store.snapshots import SnapshotFiles
from anabranch.server.store.sqlite import BUSY_TIMEOUT_MS
from anabranch.server.verify import no_run, stored_config, verify
from anabranch.support.folders import check_folder
from anabranch.support.shelf import FOLDER as SHELF
from anabranch.support.shelf import LOST, FolderRows

RESTORING = "restoring"  # in a data directory: a backup that is being put back
PARTIAL = ".partial"  # after the name of a backup that is not finished
NAMED = ("blobs", "log", "packs", "shelf", "snapshots")  # only what the database and the end of the log need
SPARED = {SQLITE_FILE, f"{SQLITE_FILE}-wal", f"{SQLITE_FILE}-shm", LOCK, marks.FILE, BACKUP, *NAMED}
SPARED |= {"spool", "models", NOISE_KEY, ASIDE, REBUILDING}
OR_ELSEWHERE = "make room, or name another place"
PAGES = 1024  # of the database, between two signs of progress
ROUNDS_MAX = 10  # so often files may be gone before they were copied

Tell = Callable[[str, int, int], None]  # what is being done, how much of it in bytes, of how much

# What has payloads in packs; data of older releases have no `mask_sums`.
TABLES = "SELECT name FROM sqlite_schema WHERE name IN ('updates', 'mask_sums')"
PACKS = "SELECT DISTINCT pack FROM {} WHERE pack IS NOT NULL"
PACKED = "SELECT pack, pack_offset, size_bytes, sha256 FROM {} WHERE pack IS NOT NULL"


@dataclass(frozen=True)
class BackupRecord:
    """What was copied. `events` and `version`: how far the log goes; `taken_at`: seconds since 1970.

    `proved`: whether the whole copy was replayed, and came to the same digests.
    """

    run_id: str
    version: int
    events: int
    taken_at: float
    size_bytes: int
    proved: bool
    program: str = field(default_factory=partial(metadata.version, "anabranch"))


class _Gone(Exception):
    """A file that the copied database names is not there any more; `name`: that file's, below the data."""

    def __init__(self, name: Path | None = None) -> None:
        super().__init__(name)
        self.name = name


def back_up(data_dir: Path, target: Path, proved: bool = True, tell: Tell | None = None) -> BackupRecord:
    """Copy a server's data, which may be in use, to a folder that is not there yet. All of it or nothing.

    `proved`: with a look at every invariant and a replay, as by `verify`. Raises `ConfigError` where the run
    is in no SQLite file or the folder is there, `DataError`, `StoreFull`, `StoreCorrupt`, `StoreLocked`.
    """
    check_source(data_dir)
    if target.exists():
        raise ConfigError(f"{target} is there already: a backup is a folder of its own, name a new one")
    if target.resolve().is_relative_to(data_dir.resolve()):
        raise ConfigError(f"{target} lies in {data_dir}, which it is to be a copy of: name another place")
    taken_at, partial = time.time(), target.with_name(f"{target.name}{PARTIAL}")
    with on_disk(partial), _emptied(partial):
        size_bytes = _Copying(data_dir, partial, tell or _quiet).run()
        made = replace(
            _looked_over(partial, proved, tell or _quiet, data_dir), taken_at=taken_at, size_bytes=size_bytes
        )
        write_private(partial / BACKUP, json.dumps(asdict(made), indent=1).encode())
        (partial / LOCK).unlink()
        sync_folder(partial)
        partial.rename(target)
        sync_folder(target.parent)
    return made


def put_back(
    source: Path, data_dir: Path, authority: Authority | None, proved: bool = True, tell: Tell | None = None
) -> tuple[BackupRecord, Restored]:
    """Make a data directory of a backup, and say by the authority's key that the run goes on from there.

    The directory is empty or not there; nothing lies in it by its name before all of it is there and sound.
    `authority`: None for a federation without one. Raises `ConfigError`, `DataError`, `StoreError`.
    """
    backup, tell = read_backup(source), tell or _quiet
    if data_dir.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{data_dir} lies in {source}, which stays as it is: name another place")
    refuse_private(stored_config(source))  # before anything is there, for which no server would start
    check_owner(data_dir)
    with on_disk(data_dir):
        make_folder(data_dir)
        lock = FolderLock(data_dir)
        try:
            _check_empty(data_dir)
            staged = data_dir / RESTORING
            make_folder(staged)
            _copy_all(source, staged, tell)
            found = _looked_over(staged, proved, tell, data_dir)
            if (found.run_id, found.events) != (backup.run_id, backup.events):
                raise StoreCorrupt(f"{source}: {BACKUP} is of another copy than the data beside it")
            word = attest(staged, "", authority)
            (staged / LOCK).unlink()  # there is one already, which is ours
            _move_up(staged, data_dir)
        finally:
            lock.release()
    return backup, word


def read_backup(folder: Path) -> BackupRecord:
    """What a backup says of itself. Raises `FolderMissing`, `DataError` where it is none, `StoreNewer`."""
    check_folder(folder, "name what `anabranch admin backup` has made")
    try:
        path = folder / BACKUP
        return from_kept(json.loads(path.read_bytes()), BackupRecord, path)
    except FileNotFoundError:
        raise DataError(
            f"{folder} has no {BACKUP}: name what `anabranch admin backup` has made; data that were copied "
            "by hand are moved back by hand, see `anabranch admin attest-restore`"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / BACKUP} is damaged ({error}): take another backup") from error


def check_restored(data_dir: Path) -> None:
    """Raises `DataError` for a directory into which a backup was put back in part."""
    if (data_dir / RESTORING).exists():
        raise DataError(
            f"{data_dir} has part of a backup, which was not put back to its end: "
            "run `anabranch admin restore` again"
        )


def check_servable(data_dir: Path) -> None:
    """Raises `DataError` for a backup, which a server would go on from, and for one put back in part.

    One that an operator has attested is no backup any more.
    """
    check_restored(data_dir)
    if (data_dir / BACKUP).exists():
        admin, here = ("anabranch", "admin"), ("--data-dir", str(data_dir))
        restore = shlex.join([*admin, "restore", str(data_dir), "--data-dir", "DIR"])
        raise DataError(
            f"{data_dir} is a backup, which would be one no more once it is served: put it back with "
            f"`{restore}`, and name that folder as the data_dir; one that was put here by hand goes on after "
            f"`{shlex.join([*admin, 'attest-restore', *here])}`"
        )


def check_source(data_dir: Path) -> None:
    """Raises unless there is a run that can be copied: `ConfigError`, `DataError`."""
    check_folder(data_dir, "name the data_dir of a server")
    if (data_dir / SQLITE_FILE).exists():
        with closing(open_store("", data_dir)) as store:
            if store.info() is None:
                raise no_run(data_dir)
        return
    if (log := Segments(data_dir)).state():
        check_alone(log, MarkFile(data_dir), data_dir / SQLITE_FILE)
    if (data_dir / "manifest").exists():
        raise ConfigError(
            f"{data_dir} has no {SQLITE_FILE}: the run is in PostgreSQL, payloads and snapshots too, "
            "and the database's own tool copies it while it serves: pg_dump --format=custom --file=TO "
            "postgresql://USER@HOST/NAME; keep a copy of this folder beside it. To put it back: pg_restore, "
            "then `anabranch admin attest-restore --database URL`"
        )
    raise no_run(data_dir)


def _check_empty(data_dir: Path) -> None:
    """Whether a backup can be put there. What a restore that was cut off has left goes."""
    names = {path.name for path in data_dir.iterdir() if not authority_exists(path)} - {LOCK, "lost+found"}
    if RESTORING not in names and names:
        raise ConfigError(
            f"{data_dir} is not empty: a backup is put back into a directory of its own. Move what is there "
            f"away, for example: {shlex.join(['mv', str(data_dir), f'{data_dir}.before'])}"
        )
    for name in sorted(names):  # it was empty when that restore began
        _remove(data_dir / name)


@contextmanager
def _emptied(partial: Path) -> Iterator[None]:
    """A folder of ours alone; what is left in it at the end, or was left by one that was killed, goes."""
    make_folder(partial)
    lock = FolderLock(partial)
    try:
        for path in partial.iterdir():
            if path.name != LOCK:
                _remove(path)
        yield
    finally:
        lock.release()
        shutil.rmtree(partial, ignore_errors=True)


class _Copying:
    """One backup under way."""

    def __init__(self, source: Path, target: Path, tell: Tell) -> None:
        self._source, self._target, self._tell = source, target, tell
        self._copied = 0
        self._gone: set[Path] = set()

    def run(self) -> int:
        """Copy everything; returns the bytes. Raises `StoreFull`, `StoreCorrupt`, `StoreError`."""
        if (mark := MarkFile(self._source).read()) is not None:
            self._check_room([Path(marks.FILE)])
            copy = MarkFile(self._target)
            copy.write(mark)
            copy.close()
        for _ in range(ROUNDS_MAX):
            self._copied = 0
            self._database()
            try:
                self._files()
            except _Gone as gone:
                self._note_gone(gone.name)
                continue
            run_id, _ = _end_of(self._target)
            self._others(self._source, self._target, run_id)
            return self._copied
        raise StoreError(
            f"{self._source}: the log drops its beginning faster than it can be copied (server.keep): "
            "keep more of it, or name a faster disk"
        )

    def _note_gone(self, name: Path | None) -> None:
        """Raises `StoreCorrupt` where it is gone once more: what is dropped loses its row first."""
        if name is None:
            return
        if name in self._gone:
            path = self._source / name
            raise StoreCorrupt(f"{path} is not there, though the database names it: `anabranch verify` tells")
        self._gone.add(name)

    def _database(self) -> None:
        """The database as it is at one moment, whatever is written meanwhile.

        Of a busy one the file alone says too little: its newest pages may all lie in SQLite's log still.
        """
        source, target = self._source / SQLITE_FILE, self._target / SQLITE_FILE
        for path in (target, target.with_name(f"{SQLITE_FILE}-wal"), target.with_name(f"{SQLITE_FILE}-shm")):
            path.unlink(missing_ok=True)
        os.close(open_file(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            with (
                closing(reading(source)) as here,
                closing(sqlite3.connect(target, isolation_level=None)) as there,
            ):
                ((page_bytes,),) = here.execute("PRAGMA page_size").fetchall()

                def told(_: int, left: int, total: int) -> None:
                    self._tell("the database", (total - left) * page_bytes, total * page_bytes)

                here.execute("BEGIN")
                here.execute("SELECT count(*) FROM sqlite_schema").fetchone()  # from here on it stands still
                here.backup(there, pages=PAGES, progress=told)
                there.execute("PRAGMA journal_mode=DELETE")  # one file, to be read from any disk
        except sqlite3.Error as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                why = f"{source} cannot be copied to {self._target}: no space left on the disk"
                raise StoreFull(f"{why}: {OR_ELSEWHERE}") from error
            raise StoreError(f"{source} cannot be copied: {error}") from error
        sync_file(target)
        self._copied += target.stat().st_size

    def _files(self) -> None:
        """What the copied database names: large payloads, packs and snapshots. Raises `_Gone`."""
        with closing(sqlite3.connect(self._target / SQLITE_FILE)) as copy:
            snapshots = [sha for (sha,) in copy.execute("SELECT sha256 FROM snapshots")]
            query = (
                "SELECT DISTINCT sha256 FROM updates WHERE payload IS NULL AND pack IS NULL AND NOT flawed"
            )
            blobs = [sha for (sha,) in copy.execute(query)]
            tables = [name for (name,) in copy.execute(TABLES)]
            packs = {number for table in tables for (number,) in copy.execute(PACKS.format(table))}
        root, files, log = BlobStore(self._source), Packs(self._source), self._log()
        named = [
            *((Path("snapshots") / f"{sha}.safetensors", sha) for sha in snapshots),  # they go first
            *((root.path(sha).relative_to(self._source), sha) for sha in blobs),
            *((path, "") for path in sorted(set(map(files.path, packs)) - set(log))),
        ]
        self._check_room([*log, *(name for name, _ in named)])
        self._copy(named)
        self._copy_log(log, {name for name, _ in named})
        self._shelf(snapshots)
        self._check_packed(tables)

    def _check_packed(self, tables: list[str]) -> None:
        """Raises `StoreCorrupt` where a payload in the copied packs is another than its row says."""
        held = Packs(self._target)
        with closing(sqlite3.connect(self._target / SQLITE_FILE)) as copy:
            for table in tables:
                for number, offset, size_bytes, sha256 in copy.execute(PACKED.format(table)):
                    held.read(PackPlace(number, offset), size_bytes, sha256)

    def _shelf(self, snapshots: list[str]) -> None:
        """What the copied snapshots name of what a strategy remembers. Raises `_Gone`."""
        files, rows = SnapshotFiles(self._target, DEFAULT_LIMITS), FolderRows(Path(SHELF))
        named = sorted({name for sha in snapshots for name in files.names(sha)})
        self._check_room([rows.path(name) for name in named])
        try:
            self._copy([(rows.path(name), name) for name in named])
        except _Gone:
            missing = [path for path in map(rows.path, named) if not (self._source / path).exists()]
            if missing and set(snapshots) <= _snapshots_in(self._source):  # nobody dropped it
                raise StoreCorrupt(
                    f"{self._source / missing[0]} is not there: {LOST} `anabranch verify` says more"
                ) from None
            raise

    def _log(self) -> list[Path]:
        """The segments that have what the copied database lacks. Raises `_Gone`, `LogLost`."""
        run_id, end = _end_of(self._target)
        try:
            needed = [] if run_id is None else Segments(self._source).needed(run_id, end)
        except LogLost as lost:
            if _end_of(self._source)[1] > end:  # it has rows of them by now, and they went
                raise _Gone from lost
            raise
        return [segment.path.relative_to(self._source) for segment in needed]

    def _copy_log(self, log: list[Path], done: set[Path]) -> None:
        """What the log has beyond the copied database, with the payloads that are files. Raises `_Gone`.

        `log`: what it had when the files were named. Packed payloads lie there, though later ones suffice.
        """
        run_id, end = _end_of(self._target)
        if run_id is None:
            return
        self._copy([(name, "") for name in dict.fromkeys([*log, *self._log()])])
        there, blobs = Segments(self._target), BlobStore(self._source)
        copied = there.needed(run_id, end)
        files, is_newer = set(), False
        for event in there.events(copied, end):
            entry = Entry.of_line(event.line)
            is_newer |= names_by_blake3(entry)
            if event.place is None and entry.record["kind"] == "update" and not entry.record["flaw"]:
                files.add(entry.record["payload"]["sha256"])
        if is_newer:
            self._say_newer()
        named = [(blobs.path(sha).relative_to(self._source), sha) for sha in sorted(files)]
        self._copy([(name, sha) for name, sha in named if name not in done])

    def _say_newer(self) -> None:
        """The log came after the database, which may not have said what the log has: see `admit_blake3`."""
        target = self._target / SQLITE_FILE
        with closing(sqlite3.connect(target)) as copy, copy:
            copy.execute("UPDATE alembic_version SET version_num = ?", (revision.NEWEST,))
        sync_file(target)

    def _check_room(self, names: list[Path]) -> None:
        needed = sum(_size(self._source / name) for name in names if not (self._target / name).exists())
        if needed > (free := free_bytes(self._target)):
            raise StoreFull(
                f"{self._target} has {free} bytes free, and {needed} are to be copied there: {OR_ELSEWHERE}"
            )

    def _copy(self, named: list[tuple[Path, str]]) -> None:
        total, done = sum(_size(self._source / name) for name, _ in named), 0
        for name, sha256 in named:
            path = self._target / name
            if sha256 and path.exists():
                self._copied += path.stat().st_size
                continue
            try:
                found = _copied(self._source / name, path, algorithm_of(sha256) if sha256 else SHA256)
            except FileNotFoundError as error:
                raise _Gone(name) from error
            if sha256 and found != sha256:
                path.unlink()
                raise StoreCorrupt(f"{self._source / name} has the digest {found}: restore it from a backup")
            size = path.stat().st_size
            self._copied, done = self._copied + size, done + size
            self._tell("payloads and snapshots", done, max(done, total))

    def _others(self, source: Path, target: Path, run_id: str | None) -> None:
        """What else lies there: the first weights, what was proved, by whom members are known."""
        for path in sorted(source.iterdir()):
            if (source == self._source and path.name in SPARED) or path.suffix == ".tmp" or path.is_symlink():
                continue
            if path.name.startswith(f"{SQLITE_FILE}."):  # what a rebuild has set aside
                continue
            if authority_exists(path):  # an image has it beside the data: it is not to lie about in copies
                continue
            if path.is_dir():
                if path.name != run_id:  # so its archive is named, wherever `server.archive` lies
                    self._others(path, target / path.name, run_id)
                continue
            try:
                _copied(path, target / path.name)
            except FileNotFoundError:  # of an upload, a proof: it was replaced by another
                continue
            self._copied += (target / path.name).stat().st_size


def reading(path: Path) -> sqlite3.Connection:
    """A database that may be in use, to be read."""
    timeout_s = BUSY_TIMEOUT_MS / 1000
    return sqlite3.connect(sqlite_address(path), uri=True, timeout=timeout_s, isolation_level=None)


def _snapshots_in(folder: Path) -> set[str]:
    """The snapshots that the database in a folder names."""
    with closing(reading(folder / SQLITE_FILE)) as database:
        return {sha256 for (sha256,) in database.execute("SELECT sha256 FROM snapshots")}


def _end_of(folder: Path) -> tuple[str | None, int]:
    """The run of the database in a folder, None if there is none, and the last event that has a row."""
    with closing(reading(folder / SQLITE_FILE)) as database:
        ((run_id,),) = database.execute("SELECT run_id FROM runs").fetchall() or [(None,)]
        ((end,),) = database.execute("SELECT COALESCE(MAX(seq), 0) FROM events").fetchall()
    return run_id, end


def _looked_over(folder: Path, proved: bool, tell: Tell, source: Path) -> BackupRecord:
    """How far a copy of a server's data goes. Raises `StoreCorrupt` unless it is sound."""
    run_id, events = _end_of(folder)
    with closing(sqlite3.connect(folder / SQLITE_FILE)) as copy:
        ((version,),) = copy.execute("SELECT COALESCE(MAX(version), 0) FROM model_versions").fetchall()
    if run_id is None:
        raise no_run(folder)
    log = Segments(folder)
    events = max((event.seq for event in log.events(log.needed(run_id, events), events)), default=events)
    if (mark := MarkFile(folder).read()) is not None and (lost := mark.lost(events)):
        raise StoreCorrupt(f"the copy lacks the last {lost} events that were acknowledged")
    if proved:
        tell("proving it", 0, 0)
        # The key of a private run is in no copy.
        found = verify(
            folder, key_folder=source, tell=lambda seq: tell(f"proving it, event {seq} of {events}", 0, 0)
        )
        if found.problems:
            raise StoreCorrupt(f"the copy is not sound: {'; '.join(found.problems)}")
        version = found.version
    return BackupRecord(run_id, version, events, 0.0, 0, proved)


def _copy_all(source: Path, target: Path, tell: Tell) -> None:
    """A backup as it is."""
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and path.name != LOCK]
    total, done = sum(_size(path) for path in files), 0
    if total > (free := free_bytes(target)):
        raise StoreFull(f"{target} has {free} bytes free, and {total} are to be copied there: {OR_ELSEWHERE}")
    for path in files:
        name = path.relative_to(source)
        if str(name) != BACKUP:
            _copied(path, target / name)
        done += _size(path)
        tell("the backup", done, total)


def _move_up(staged: Path, data_dir: Path) -> None:
    """Give everything its name, the database last."""
    for path in sorted(staged.iterdir(), key=lambda path: path.name.startswith(SQLITE_FILE)):
        path.rename(data_dir / path.name)
    sync_folder(data_dir)
    staged.rmdir()
    sync_folder(data_dir)


def _copied(source: Path, target: Path, algorithm: str = SHA256) -> str:
    """Copy a file durably, for its owner alone; returns its digest."""
    if not target.parent.exists():
        make_folder(target.parent)
    made = ContentHash(algorithm)
    with (
        open(open_file(source, os.O_RDONLY), "rb", buffering=0) as here,
        open(open_file(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as there,
    ):
        while piece := here.read(MIB):
            made.update(piece)
            there.write(piece)
        there.flush()
        os.fsync(there.fileno())
    sync_folder(target.parent)
    return made.text()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _quiet(doing: str, done: int, total: int) -> None:
    """Tell nobody."""
