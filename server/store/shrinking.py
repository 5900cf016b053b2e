"""SQLite's file made smaller at a start, where much of it is free: `server.keep` drops rows, and leaves room.

What is kept is copied into a file beside it, which takes its place once it is durable. Where the disk has no
room for that, or somebody else has the file open, it stays as it is.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from anabranch.core.limits import MIB
from anabranch.identity.files import sync_folder
from anabranch.server.store.files import disk_errors, free_bytes, open_file, sqlite_address, sync_file

FREE_BYTES = 64 * MIB  # it is done for so much, if it is half of the file as well
NEW = ".smaller"  # after the file's name: the copy under way

log = logging.getLogger(__name__)


def shrink(path: Path, free_bytes_min: int) -> None:
    """Give back what is free in a file that nobody writes. `free_bytes_min`: of the disk, left alone.

    Raises `DiskFailed`.
    """
    new = path.with_name(f"{path.name}{NEW}")
    new.unlink(missing_ok=True)  # of one that was killed
    if path.is_symlink() or not path.exists() or not path.stat().st_size:
        return
    try:
        address = sqlite_address(path, "rw")
        with closing(sqlite3.connect(address, uri=True, timeout=0, isolation_level=None)) as file:
            free, kept = _sizes(file)
            if free < max(FREE_BYTES, kept) or free_bytes(path.parent) < kept + free_bytes_min:
                return
            log.info("%d MiB of %s are free: it becomes smaller", free // MIB, path)
            _copy_alone(file, new)
            with disk_errors(f"replacing {path}"):
                new.rename(path)
                sync_folder(path.parent)
    except (sqlite3.Error, OSError) as error:
        new.unlink(missing_ok=True)
        log.warning("%s stays as large as it is: %s", path, error)


def _sizes(file: sqlite3.Connection) -> tuple[int, int]:
    """Bytes that are free in it, and bytes that are not."""
    page, pages, free = (
        file.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count", "freelist_count")
    )
    return free * page, (pages - free) * page


def _copy_alone(file: sqlite3.Connection, new: Path) -> None:
    """Copy what is kept, durably, with a lock on the old file that lasts until it is closed.

    Without SQLite's own log, which only whoever has it alone can end: a file of that name would be the new
    one's then. The lock comes first: between the two a reader could begin, and go on with the old file.
    """
    file.execute("PRAGMA locking_mode=EXCLUSIVE")
    file.execute("PRAGMA journal_mode=DELETE")
    file.execute("BEGIN EXCLUSIVE")
    file.execute("COMMIT")
    os.close(open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # so that it is its owner's alone
    file.execute("VACUUM INTO ?", (str(new.absolute()),))
    sync_file(new)
