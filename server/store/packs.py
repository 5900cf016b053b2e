"""Payloads of middle size, one after the other in files that only grow: `packs/<number>.pack`.

Too large for a row, too many for files of their own: a file takes two flushes of the disk, a pack one
for all the payloads of a commit. A row says where its payload lies; bytes that no row names, left by a
commit that failed, are never looked at. Every start, and every failure, begins a new pack.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.core.errors import StoreCorrupt
from anabranch.core.limits import MIB
from anabranch.server.store.files import disk_errors, make_own_folder, open_file, sync_folder

PACK_BYTES = 256 * MIB  # a pack is closed when it is this large


@dataclass(frozen=True)
class PackPlace:
    """Where a payload lies."""

    pack: int
    offset: int


class Packs:
    """Files that only grow, with payloads of middle size one behind the other.

    For the writer's thread; `read` for any.
    """

    def __init__(self, data_dir: Path, pack_bytes: int = PACK_BYTES) -> None:
        self.folder, self._pack_bytes = data_dir / "packs", pack_bytes
        self._descriptor: int | None = None
        self._number, self._size = 0, 0

    def prepare(self) -> None:
        """Make the folder. Raises `StoreFull`, `DiskFailed`."""
        with disk_errors("making the data directory"):
            make_own_folder(self.folder)
            self._number = max((int(path.stem) for path in self.folder.glob("*.pack")), default=0)

    def write(self, payloads: Sequence[bytes]) -> list[PackPlace]:
        """Make payloads durable, with one flush. Raises `StoreFull`, `DiskFailed`."""
        if not payloads:
            return []
        with disk_errors("storing payloads"):
            try:
                places = [self._put(payload) for payload in payloads]
                assert self._descriptor is not None
                os.fdatasync(self._descriptor)
            except OSError:
                self.close()
                raise
        return places

    def read(self, place: PackPlace, size_bytes: int, sha256: str) -> bytes:
        """The bytes of a payload, its digest checked. Raises `StoreCorrupt`."""
        try:
            descriptor = open_file(self._path(place.pack), os.O_RDONLY)
            try:
                data = os.pread(descriptor, size_bytes, place.offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreCorrupt(f"payload {sha256} cannot be read ({error}): restore a backup") from error
        if (found := hashlib.sha256(data).hexdigest()) != sha256:
            raise StoreCorrupt(f"payload {sha256} has the SHA-256 {found}: restore it from a backup")
        return data

    def remove_before(self, first: int | None) -> None:
        """Remove the packs before the first that a row names; none of them is written any more."""
        with disk_errors("removing old payloads"):
            end = self._number if first is None else min(first, self._number)
            gone = [path for path in self.folder.glob("*.pack") if int(path.stem) < end]
            for path in gone:
                path.unlink()
            if gone:
                sync_folder(self.folder)

    def close(self) -> None:
        """Write no more into the pack at hand."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _put(self, payload: bytes) -> PackPlace:
        if self._descriptor is None or self._size >= self._pack_bytes:
            self._begin()
        assert self._descriptor is not None
        place, view = PackPlace(self._number, self._size), memoryview(payload)
        while view:
            written = os.pwrite(self._descriptor, view, self._size)
            view, self._size = view[written:], self._size + written
        return place

    def _begin(self) -> None:
        """A new pack; what was put into the one before is flushed with it."""
        if self._descriptor is not None:
            os.fdatasync(self._descriptor)
            self.close()
        self._number, self._size = self._number + 1, 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._descriptor = open_file(self._path(self._number), flags)
        sync_folder(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.pack"


def read_payload(row: Any, packs: Packs) -> bytes:
    """The bytes of a row of `updates` or `mask_sums` that has them, or their place. Raises `StoreCorrupt`."""
    if row.payload is None:
        return packs.read(PackPlace(row.pack, row.pack_offset), row.size_bytes, row.sha256)
    data: bytes = row.payload
    if (found := hashlib.sha256(data).hexdigest()) != row.sha256:
        raise StoreCorrupt(f"payload {row.sha256} has the SHA-256 {found}: restore it from a backup")
    return data
