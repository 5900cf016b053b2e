"""Files that survive a power cut: what to flush, what a failure means, who owns a folder."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import quote

from anabranch.core.errors import StoreCorrupt, StoreError, StoreFull, StoreLocked, broken_link
from anabranch.core.limits import KIB
from anabranch.identity.files import sync_folder, tighten, tighten_tree, whose
from anabranch.server.store.base import DiskFailed
from anabranch.support.forks import give_back, keep_from_copies
from anabranch.support.held import leads_to
from anabranch.support.holders import forget_holder, holder_of, note_holder

log = logging.getLogger(__name__)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of its headers
SQLITE_FILE = "anabranch.db"  # in a data directory: the rows of a run that is not in PostgreSQL
ASIDE = "lost"  # in a data directory: a database that its operator has moved out of the way
REBUILDING = "rebuilding"  # in a data directory: where a database is made anew (`server/rebuild.py`)
LOCK = "lock"  # in a folder: whoever has it locked owns the folder
# At once to a file. Not whole pages of memory: pieces of 64 KiB to 1 MiB took the kernel five times as long
# on a virtual machine (72 to 85 ms of 40 MB, and 17 of these), be they copied from whatever address; so did
# all of it at once.
PIECE_BYTES = 255 * KIB
MISPLACED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)


@contextmanager
def disk_errors(doing: str, misplaced: Collection[int] = MISPLACED) -> Iterator[None]:
    """Turn the operating system's errors into `StoreFull`, `StoreError` or, for most, `DiskFailed`.

    `misplaced`: the numbers of those that say where something lies, and nothing of what is on the disk.

    A failed fsync is never tried again: the kernel drops the pages it could not write, and the
    next fsync would say that all is well.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise StoreFull(f"{doing}: no space left on the disk; nothing acknowledged is lost") from error
        if error.errno in misplaced:
            hint = whose(Path(error.filename or "."), error)
            raise StoreError(
                f"{doing}: {error}{hint}; check data_dir, its owner and what lies in it"
            ) from error
        raise DiskFailed(f"{doing}: {error}; what is on the disk is unknown, restart to recover") from error


@contextmanager
def stored_values(where: str) -> Iterator[None]:
    """What was read from a store and makes no sense was damaged there: `StoreCorrupt`."""
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise StoreCorrupt(f"{where} cannot be read: {error!r}; restore a backup") from error


def check_space(folder: Path, free_bytes_min: int, then: str = "and it goes on by itself") -> None:
    """Raises `StoreFull` when the disk has fewer free bytes than the watermark, `DiskFailed`.

    `then`: what comes after there is room.
    """
    if (free := free_bytes(folder)) < free_bytes_min:
        raise StoreFull(
            f"{folder} has {free} bytes free, under the watermark of {free_bytes_min} "
            f"(limits.free_disk_bytes_min): make room {then}"
        )


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk of a folder. Raises `DiskFailed`."""
    return disk_bytes(folder)[0]


def disk_bytes(folder: Path) -> tuple[int, int]:
    """Bytes of the disk of a folder: what is free of it, and in all. Raises `DiskFailed`."""
    with disk_errors("looking at the disk"):
        disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize


def make_folder(folder: Path) -> None:
    """A folder for its owner alone, though it was there, with its name durable in the folder above it.

    Raises `OSError`, where something else lies there as well.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if why := broken_link(folder):
        raise NotADirectoryError(errno.ENOTDIR, why)
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        sync_folder(path.parent)
    tighten(folder)


def make_own_folder(folder: Path) -> None:
    """Such a folder, of which everything in it is ours."""
    if folder.exists():
        tighten_tree(folder)
    make_folder(folder)


def sqlite_address(path: Path, mode: str = "ro") -> str:
    """A file as `sqlite3.connect` takes it with `uri=True`, whatever is in its name; `mode`: `ro` or `rw`.

    Where nothing may be written beside it SQLite reads only what nobody changes, which it has to be told: who
    writes has a log of its own there.
    """
    where = path.absolute()
    beside = where.with_name(f"{where.name}-wal")
    has_log = beside.exists() and beside.stat().st_size > 0
    still = mode == "ro" and not os.access(where.parent, os.W_OK) and not has_log
    return f"file:{quote(os.fsencode(where))}?mode={mode}{'&immutable=1' if still else ''}"


def open_file(path: Path, flags: int) -> int:
    """A descriptor of a file for its owner alone; a link in its place is an error."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Inside, such a descriptor: it is closed at the end."""
    descriptor = open_file(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable."""
    with opened(path) as descriptor:
        os.fsync(descriptor)


def write_all(file: IO[bytes], part: bytes | memoryview) -> None:
    """All of it, in pieces; an unbuffered file may take less than one at a time."""
    view = memoryview(part)
    while view:
        view = view[file.write(view[:PIECE_BYTES]) :]


def begin_write_out(descriptor: int) -> None:
    """Have the disk begin with what was written to a file, so that there is less for a flush to wait for.

    Nothing is durable after it. A write that fails is told by the flush that comes.
    """
    if _SYNC_FILE_RANGE is not None:
        whole = ctypes.c_int64(0)
        _SYNC_FILE_RANGE(descriptor, whole, whole, _WRITE)


class FolderLock:
    """One process at a time owns a folder. The kernel lets go of the lock when the process dies."""

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / LOCK
        with disk_errors("locking the data directory"):
            self._descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
            tighten(path)
            self._held = os.fstat(self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = holder_of(self._descriptor)
            os.close(self._descriptor)
            if error.errno != errno.EWOULDBLOCK:
                raise StoreError(f"{path} cannot be locked ({error}): use a local disk") from error
            raise StoreLocked(
                f"{folder} is in use by process {owner or 'unknown'}: stop it, or use another data_dir"
            ) from error
        note_holder(self._descriptor, folder, log)
        keep_from_copies(self._descriptor)

    def check(self) -> None:
        """Raises `DiskFailed` where the folder's name leads to another one by now, or anybody may lock it."""
        with disk_errors(f"looking at {self._path}"):
            if leads_to(self._path, self._held):
                return
        raise DiskFailed(
            f"{self._path} is not what this server has locked: its folder was moved, or replaced, or the "
            "file removed, under a server at work; it ends, and what it has acknowledged is in the folder "
            "that it had, or its database. Stop it before you put other data there, and never delete `lock`"
        )

    def release(self) -> None:
        """Let another process in."""
        forget_holder(self._descriptor)
        give_back(self._descriptor)
        os.close(self._descriptor)
