"""Snapshots as safetensors files, named by their content: `snapshots/<sha256>.safetensors`.

The JSON of a snapshot is in its file as well, as a tensor of bytes, so that one digest covers all. A note in
the file's header says where that names nothing on a shelf: a start need not look through it. Files of before
there were notes, and those that name something, have none.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from anabranch.core.engine.shelf import ROW, rows_named
from anabranch.core.errors import StoreCorrupt, check_format
from anabranch.core.limits import Limits
from anabranch.core.model.arrays import plain_tensors, to_bytes
from anabranch.core.model.params import NOTES
from anabranch.core.snapshot import APART, FORMAT, Snapshot
from anabranch.identity.files import sync_folder
from anabranch.server.store.files import check_space, disk_errors, make_own_folder, open_file, write_all
from anabranch.server.store.tensors import TensorFile, beginning_of, placed

META = "$meta"
NO_ROWS = {"shelf": "none"}


class SnapshotFiles:
    """Writes durably, reads with the digest checked. One is written at a time, in whatever thread.

    It lies there before a row names it, and old ones may be removed meanwhile. So the newest that this
    process has written stays, whatever the rows say.
    """

    def __init__(self, data_dir: Path, limits: Limits) -> None:
        self.folder = data_dir / "snapshots"
        self._limits = limits
        self._lock = threading.Lock()  # whoever removes, against whoever is about to put a file there
        self._newest = ""  # that this process has written, or is about to

    def prepare(self) -> None:
        """Make the folder, and remove what a crash left half written."""
        with disk_errors(f"making {self.folder}"):
            make_own_folder(self.folder)
            for path in (*self.folder.glob("*.tmp"), *self.folder.glob(".tmp*")):
                path.unlink()

    def path(self, sha256: str) -> Path:
        """Where the snapshot of this digest lies, or would lie."""
        return self.folder / f"{sha256}.safetensors"

    def write(self, snapshot: Snapshot) -> str:
        """Make a snapshot durable; returns the SHA-256 of its file. Raises `StoreFull`, `DiskFailed`."""
        check_space(self.folder, self._limits.free_disk_bytes_min)
        tensors = plain_tensors(snapshot.arrays)
        meta = json.dumps(snapshot.meta).encode()
        tensors[META] = np.frombuffer(meta, np.uint8)
        # A key is in its JSON as it is, whatever else may look like it there.
        notes = {} if json.dumps(ROW).encode() in meta else NO_ROWS
        temporary = self.folder / f"{uuid.uuid4().hex}.tmp"
        try:
            with disk_errors("writing a snapshot"):
                sha256 = _save(tensors, temporary, notes)
                with self._lock:
                    self._newest = sha256
                self._keep(temporary, sha256)
        except BaseException:
            with suppress(OSError):  # a disk that fails fails here as well: what it said first is what counts
                temporary.unlink(missing_ok=True)
            raise
        temporary.unlink(missing_ok=True)  # where what is kept is a copy
        return sha256

    def read(self, sha256: str) -> Snapshot:
        """The snapshot of a digest, without what is in rows. Raises `StoreCorrupt`, `StoreNewer`."""
        name = self.path(sha256).name
        try:
            with self._found(sha256) as path:
                if (found := _digest(path)) != sha256:
                    raise StoreCorrupt(f"snapshot {name} has the SHA-256 {found}")
                tensors = TensorFile(path)
            meta = json.loads(tensors[META].tobytes())
            tensors.arrange(name for name in tensors if name != META)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise StoreCorrupt(f"snapshot {name} cannot be read: {error}") from error
        found = meta.get("format")
        check_format(f"snapshot {name}", found, APART)
        if found not in (FORMAT, APART):  # the log has it all
            raise StoreCorrupt(
                f"snapshot {name} is of format {found}, this program reads {FORMAT} and {APART}"
            )
        return Snapshot(meta, tensors)

    def names(self, sha256: str) -> set[str]:
        """What a snapshot names on a shelf, by its header and its JSON alone. Raises `StoreCorrupt`."""
        try:
            with self._found(sha256) as path:
                tensors = TensorFile(path)
                if tensors.notes == NO_ROWS:
                    return set()
                return set(rows_named(json.loads(tensors[META].tobytes())))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise StoreCorrupt(f"snapshot {self.path(sha256).name} cannot be read: {error}") from error

    def others(self, named: set[str]) -> list[str]:
        """The digests of the files that are none of these."""
        return sorted(path.stem for path in self.folder.glob("*.safetensors") if path.stem not in named)

    def version_of(self, sha256: str) -> int | None:
        """The version of a snapshot, None if it cannot be read."""
        try:
            return int(self.read(sha256).meta["version"])
        except StoreCorrupt:
            return None

    def set_aside(self, digests: Iterable[str]) -> None:
        """Take files out of use, and keep them."""
        with disk_errors("setting snapshots aside"):
            for path in map(self.path, digests):
                path.rename(path.with_suffix(".lost"))

    def remove_all_but(self, kept: set[str]) -> None:
        """Remove the files that no row names any more: after the commit that superseded them."""
        with self._lock:
            self._remove_all_but(kept | {self._newest})

    def _remove_all_but(self, kept: set[str]) -> None:
        with disk_errors("removing old snapshots"):
            gone = [p for p in self.folder.glob("*.safetensors") if p.stem not in kept]
            for path in gone:
                path.unlink()
            if gone:
                sync_folder(self.folder)

    def _keep(self, temporary: Path, sha256: str) -> None:
        temporary.rename(self.path(sha256))
        sync_folder(self.folder)

    @contextmanager
    def _found(self, sha256: str) -> Iterator[Path]:
        """The file of a snapshot, if it is there."""
        yield self.path(sha256)


def named_by(snapshot: Snapshot) -> set[str]:
    """What a snapshot that was read names on a shelf."""
    arrays = snapshot.arrays
    if isinstance(arrays, TensorFile) and arrays.notes == NO_ROWS:
        return set()
    return set(rows_named(snapshot.meta))


def _save(tensors: dict[str, npt.NDArray[Any]], path: Path, notes: dict[str, str]) -> str:
    """Write a safetensors file durably; returns its SHA-256.

    By hand, because the library's own function holds a second copy of every tensor in memory.
    """
    head = ({NOTES: notes} if notes else {}) | placed(tensors, tensors)
    sha = hashlib.sha256()
    with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb", buffering=0) as file:
        parts: list[bytes | memoryview] = [beginning_of(json.dumps(head)), *map(to_bytes, tensors.values())]
        for part in parts:
            sha.update(part)
            write_all(file, part)
        os.fsync(file.fileno())
    return sha.hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
