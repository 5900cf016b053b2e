"""The shelf of a data directory: rows that survive a kill and a power cut once a snapshot names them.

A row is written when an update is folded, and flushed before the snapshot that names it is. Until then it
need not survive: the log has the update, and a start folds it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from anabranch.core.errors import StoreFull
from anabranch.identity.files import sync_folder
from anabranch.server.failpoints import reach
from anabranch.server.store.base import DiskFailed
from anabranch.server.store.files import check_space, disk_errors, make_folder, make_own_folder, opened
from anabranch.support.page_cache import uncache
from anabranch.support.shelf import FOLDER, START_AGAIN, FolderRows, Pieces

RESTORE = (
    "Restore a backup: the log does not begin with its first event (server.keep), so that it cannot be made "
    "again. Leave the file where it is: a server goes on with it until that device comes again"
)


class StoredRows(FolderRows):
    """The rows of a server. Raises `StoreFull`, also under the disk's watermark, and `DiskFailed`."""

    def __init__(
        self, data_dir: Path, free_bytes_min: int, begins_late: Callable[[], bool] = lambda: False
    ) -> None:
        """`begins_late`: whether the log cannot make a row again, as it lacks its first events."""
        super().__init__(data_dir / FOLDER)
        self._free_bytes_min, self._begins_late = free_bytes_min, begins_late

    @property
    def remedy(self) -> str:
        """See `RowPlace`."""
        return RESTORE if self._begins_late() else START_AGAIN

    def write(self, sha256: str, row: Pieces) -> None:
        """See `RowPlace`."""
        if not self.folder.exists():
            with self.errors(f"making {self.folder}"):
                make_own_folder(self.folder)
        check_space(self.folder, self._free_bytes_min)
        super().write(sha256, row)
        reach("shelf_written")

    def flush(self, names: Collection[str]) -> set[str]:
        """See `RowPlace`. Raises `DiskFailed` also for want of room: nobody has the bytes any more."""
        try:
            with self.errors("flushing what a strategy remembers"):
                here = {name for name in sorted(names) if _flushed(self.path(name))}
                for folder in sorted({self.path(name).parent for name in here}):
                    sync_folder(folder)
        except StoreFull as full:
            raise DiskFailed(f"{full}; what is on the disk is unknown, restart to recover") from full
        if names:
            reach("shelf_flushed")
        return set(names) - here

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
    with suppress(FileNotFoundError), opened(path) as descriptor:
        os.fsync(descriptor)
        uncache(descriptor)
        return True
    return False
