"""The processes of this user that train on this machine: together they have its cores.

Each holds the lock of one file; the files of processes that are gone are free. Where there is no such folder,
or it is not ours, a process takes itself to be alone.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from anabranch.support.forks import kept_from_copies

PLACES_MAX = 1024
FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def meeting_place() -> Path:
    """The folder of the locks, the same for all of one user's processes."""
    return Path(tempfile.gettempdir()) / f"anabranch-neighbours-{os.getuid()}"


class Neighbours:
    """One of them; a context manager. `count` is right while one is inside."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or meeting_place()
        self._held = ExitStack()

    def count(self) -> int:
        """How many there are, this one too: at least 1."""
        try:
            return max(1, sum(_is_held(path) for path in self._folder.iterdir()))
        except OSError:
            return 1

    def __enter__(self) -> Neighbours:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._folder.stat().st_uid == os.getuid():
                self._take_place()
        except OSError:
            pass  # it is alone, as far as it knows
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._held.close()

    def _take_place(self) -> None:
        for place in range(PLACES_MAX):
            file = os.open(self._folder / str(place), FLAGS, 0o600)
            if _locks(file, fcntl.LOCK_EX):
                self._held.callback(os.close, file)
                self._held.enter_context(kept_from_copies(file))
                return
            os.close(file)


def _is_held(path: Path) -> bool:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return not _locks(file, fcntl.LOCK_SH)  # shared, so that two who count do not take each other for one
    finally:
        os.close(file)


def _locks(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
