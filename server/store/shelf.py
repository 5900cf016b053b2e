"""The shelf of a data directory: rows that survive a kill and a power cut once a snapshot names them.

A row is written when an update is folded, and flushed before the snapshot that names it is. Until then it
need not survive: the log has the update, and a start folds it again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from anabranch.core.errors import StoreFull
from anabranch.server.failpoints import reach
from anabranch.server.store.base import DiskFailed
from anabranch.server.store.files import (
    check_space,
    disk_errors,
    make_folder,
    make_own_folder,
    open_file,
    sync_folder,
)
from anabranch.support.shelf import FOLDER, FolderRows, Pieces, forget_pages


class StoredRows(FolderRows):
    """The rows of a server. Raises `StoreFull`, also under the disk's watermark, and `DiskFailed`."""

    def __init__(self, data_dir: Path, free_bytes_min: int) -> None:
        super().__init__(data_dir / FOLDER)
        self._free_bytes_min = free_bytes_min

    def write(self, sha256: str, row: Pieces) -> None:
        """See `RowPlace`."""
        if not self.folder.exists():
            with self.errors(f"making {self.folder}"):
                make_own_folder(self.folder)
        check_space(self.folder, self._free_bytes_min)
        super().write(sha256, row)
        reach("shelf_written")

    def flush(self, names: Collection[str]) -> None:
        """See `RowPlace`. Raises `DiskFailed` also for want of room: nobody has the bytes any more."""
        try:
            with self.errors("flushing what a strategy remembers"):
                folders = {path.parent for path in map(self.path, names) if _flushed(path)}
                for folder in sorted(folders):
                    sync_folder(folder)
        except StoreFull as full:
            raise DiskFailed(f"{full}; what is on the disk is unknown, restart to recover") from full
        if names:
            reach("shelf_flushed")

    def remove(self, names: Iterable[str]) -> None:
        """See `RowPlace`."""
        names = list(names)
        super().remove(names)
        if names:
            reach("shelf_cleared")

    def errors(self, doing: str) -> AbstractContextManager[None]:
        """See `FolderRows`."""
        return disk_errors(doing)

    def make_folder(self, folder: Path) -> None:
        """With its name durable in the folder above it."""
        make_folder(folder)


def _flushed(path: Path) -> bool:
    """Make a file durable; whether it is there."""
    with suppress(FileNotFoundError):
        descriptor = open_file(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            forget_pages(descriptor)
        finally:
            os.close(descriptor)
        return True
    return False
