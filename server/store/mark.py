"""How far the log had come when it was last acknowledged: `acknowledged`, a file of its own beside the data.

SQLite ends its log where a checksum fails, and takes what follows for a write that the power cut off. So it
cannot tell a commit that nobody heard of from one that was acknowledged and then damaged. This file can: it
is written after each commit, before anybody hears of it, and a log that does not reach it has lost something.

It is written in place, into two slots in turns, each a block of the disk with a digest of its own: a write
that is cut off spoils one slot, and the other one has what was acknowledged before.

A flush is for a power cut: what a process has written outlives it. So a mark may wait for its flush, up to
`FLUSHED_S`, and the slot that was flushed last is left alone until then.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from anabranch.core.errors import StoreCorrupt, StoreFull
from anabranch.core.plain import from_kept
from anabranch.identity.files import sync_folder, tighten
from anabranch.server.store.base import DiskFailed, Mark
from anabranch.server.store.files import disk_errors, open_file, opened

FILE = "acknowledged"
SLOT_BYTES = 4096
SLOTS = 2
FLUSHED_S = 1.0  # after so long the next mark is flushed
_FIX = (
    "if the data are whole otherwise (`anabranch verify`), say so with `anabranch admin attest-restore`, "
    "else restore a backup"
)


class MarkFile:
    """The file that says how far the log had come when somebody was last answered.

    For one thread at a time, the writer's.
    """

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / FILE
        self._flush_at, self._waits = 0.0, False
        self._descriptor: int | None = None
        self._slot = 0

    def read(self) -> Mark | None:
        """The newest mark, None where there is no file. Raises `StoreCorrupt` where no slot is whole.

        A disk that does not read it now says nothing of what is on it: `DiskFailed`.
        """
        data = None
        with disk_errors(f"reading {self.path}"), suppress(FileNotFoundError):
            data = self._bytes()
        if data is None:
            return None
        marks = [_mark(data[n * SLOT_BYTES : (n + 1) * SLOT_BYTES]) for n in range(SLOTS)]
        if len(data) != SLOTS * SLOT_BYTES or not any(marks):
            raise StoreCorrupt(f"{self.path} is damaged, and says how far the log had come: {_FIX}")
        newest = max(range(SLOTS), key=lambda n: -1 if (mark := marks[n]) is None else mark.seq)
        self._slot = (newest + 1) % SLOTS
        return marks[newest]

    def write(self, mark: Mark, flushed: bool = True) -> None:
        """Write a mark, and make it durable, now or with a later one. Raises `DiskFailed`.

        Whatever is raised, the log is ahead of it already.
        """
        try:
            with disk_errors(f"writing {self.path}"):
                if self._descriptor is None:
                    self._open(mark)
                assert self._descriptor is not None
                _put(self._descriptor, _slot(mark), self._slot * SLOT_BYTES)
                self._waits = True
                if flushed or time.monotonic() >= self._flush_at:
                    self._flush()
        except StoreFull as full:
            raise DiskFailed(f"{full}; restart to recover") from full

    def settle(self) -> None:
        """Flush what waits. Raises `DiskFailed`, `StoreFull`."""
        if self._waits:
            with disk_errors(f"writing {self.path}"):
                self._flush()

    def _flush(self) -> None:
        assert self._descriptor is not None, "it was written"
        os.fdatasync(self._descriptor)
        self._slot, self._waits = (self._slot + 1) % SLOTS, False
        self._flush_at = time.monotonic() + FLUSHED_S

    def remove(self) -> None:
        """Forget how far the log had come: it is the operator's word that it goes on from where it ends."""
        self.close()
        with disk_errors(f"removing {self.path}"):
            self.path.unlink(missing_ok=True)
            sync_folder(self.path.parent)

    def close(self) -> None:
        """Let go of the file; what waits for its flush gets it, if the disk can."""
        if self._descriptor is not None:
            if self._waits:
                with suppress(OSError):
                    self._flush()
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self, mark: Mark) -> None:
        """Open the file; where there is none, make one with all its blocks, whole or not at all."""
        with suppress(FileNotFoundError):
            self._descriptor = open_file(self.path, os.O_RDWR)
            tighten(self.path)
            os.fsync(self._descriptor)  # whoever was here before may have left a slot that waits
            return
        unfinished = self.path.with_name(f"{FILE}.tmp")
        unfinished.unlink(missing_ok=True)
        self._descriptor = descriptor = open_file(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        _put(descriptor, SLOTS * _slot(mark), 0)
        os.fsync(descriptor)
        unfinished.rename(self.path)
        sync_folder(self.path.parent)

    def _bytes(self) -> bytes:
        with opened(self.path) as descriptor:
            return os.pread(descriptor, SLOTS * SLOT_BYTES + 1, 0)


def _put(descriptor: int, data: bytes, at: int) -> None:
    """Write all of it: a disk with room for less takes what it can, and says so at the next try."""
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


def _slot(mark: Mark) -> bytes:
    text = json.dumps({"head": mark.head, "run_id": mark.run_id, "seq": mark.seq})  # in their order
    lines = f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n".encode()
    return lines.ljust(SLOT_BYTES)


def _mark(slot: bytes) -> Mark | None:
    """The mark in a slot, None if it is not whole."""
    text, _, rest = slot.partition(b"\n")
    if rest.partition(b"\n")[0] != hashlib.sha256(text).hexdigest().encode():
        return None
    return from_kept(json.loads(text), Mark, FILE)
