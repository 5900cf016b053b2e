"""How much a data directory may hold: `server.disk_bytes_max`, beside the disk's own end."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from anabranch.core.clock import Seconds
from anabranch.core.errors import StoreFull
from anabranch.server.store.files import disk_errors

EVERY_S = 2.0
SHARE = 50  # a look takes at most a part in so many of the time


class Quota:
    """Looks every few seconds, by so much it may be exceeded. For one thread at a time; 0 bytes: no bound."""

    def __init__(self, folder: Path, bytes_max: int, monotonic: Seconds = time.monotonic) -> None:
        self._folder, self._bytes_max, self._monotonic = folder, bytes_max, monotonic
        self._used, self._look_at = 0, 0.0

    def check(self) -> None:
        """Raises `StoreFull` where the directory holds more."""
        if self._bytes_max and self._look() > self._bytes_max:
            raise StoreFull(
                f"{self._folder} holds {self._used} bytes, over server.disk_bytes_max = {self._bytes_max}: "
                "start the server with more, or with a server.keep that drops what is old, and once more "
                "when that has gone, which SQLite's file gives back at a start"
            )

    def of_disk(self, free: int, size: int) -> tuple[int, int]:
        """What may still be written, and what in all, of a disk with so many bytes free and in all."""
        if not self._bytes_max:
            return free, size
        return min(free, max(0, self._bytes_max - self._look())), min(size, self._bytes_max)

    def _look(self) -> int:
        if (began := self._monotonic()) >= self._look_at:
            with disk_errors("looking at the data directory"):
                self._used = held_bytes(self._folder)
            ended = self._monotonic()
            self._look_at = ended + max(EVERY_S, SHARE * (ended - began))
        return self._used


def held_bytes(folder: Path) -> int:
    """What the files of a folder take on the disk, those that go meanwhile left out."""
    total, folders = 0, [str(folder)]
    while folders:
        with suppress(FileNotFoundError), os.scandir(folders.pop()) as found:
            for entry in found:
                with suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
