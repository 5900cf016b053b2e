"""Who has a folder's lock: told to who wants it as well, and to the next one where it was not let go of."""

from __future__ import annotations

import atexit
import os
import platform
from contextlib import suppress
from logging import Logger
from pathlib import Path

from anabranch.support.allowance import memory_bytes

NOTE_BYTES_MAX = 128
CLEARED = "this note goes when the lock does"  # earlier checkouts left theirs there, without it

_noted: set[int] = set()  # locks that this process has


def holder_of(lock: int) -> str:
    """Who has noted in the file of a lock that it has it; empty: nobody."""
    return _note_of(lock).partition("\n")[0]


def _note_of(lock: int) -> str:
    return os.pread(lock, NOTE_BYTES_MAX, 0).decode("utf-8", "replace").strip()


def note_holder(lock: int, folder: Path, log: Logger) -> None:
    """Note that this process has a lock now, and warn where who had it did not let go of it."""
    with suppress(OSError):  # it is for messages only, and the disk may be full of what is yet to go
        killed, note = holder_of(lock), _note_of(lock)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{_ours()}\n{CLEARED}\n".encode(), 0)
        _noted.add(lock)
        if note.endswith(CLEARED):
            log.warning(
                "%s: process %s, which had it before, was killed, ended without letting go of it, or its "
                "machine stopped. Where its code was 137, memory may have run out: this one may have %d MB",
                *(folder, killed, memory_bytes() // 1_000_000),
            )


def forget_holder(lock: int) -> None:
    """Before a lock is let go of in order; not by a forked copy, where the number may be another file's."""
    _noted.discard(lock)
    with suppress(OSError):
        if holder_of(lock) == _ours():
            os.ftruncate(lock, 0)


@atexit.register
def _forget_noted() -> None:
    """A program may end without a word to its servers and devices: nobody has killed them."""
    for lock in tuple(_noted):
        forget_holder(lock)


def _ours() -> str:
    return f"{os.getpid()} on {platform.node()}"  # in containers everybody is process 1
