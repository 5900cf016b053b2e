"""Payloads that lie one behind the other in files: segments of the log, and packs of before there was one.

A row says where its payload lies. Segments and packs are numbered together, so a number names one file.
Nothing is written into packs any more: `packs/<number>.pack` are of older releases.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, and_, case, select

from anabranch.core.content import check_content
from anabranch.core.errors import StoreCorrupt
from anabranch.identity.files import sync_folder
from anabranch.server.store.files import disk_errors, open_file
from anabranch.server.store.schema import mask_sums, updates

FOLDERS = {"log": ".log", "packs": ".pack"}
# Of a row of `updates`: the payload is a file of its own, or in `chunks`. Of a flawed one none need be there.
IN_A_FILE = and_(updates.c.payload.is_(None), updates.c.pack.is_(None), ~updates.c.flawed)


@dataclass(frozen=True)
class PackPlace:
    """Where a payload lies: in which segment or pack, and from which byte on."""

    pack: int
    offset: int


class Packs:
    """The files of a data directory that have payloads of middle size. From any thread."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir

    def path(self, number: int) -> Path:
        """The file of a number, relative to the data directory; a segment's where there is none."""
        log, pack = _names(number)
        return Path(pack if (self._data_dir / pack).exists() else log)

    def missing(self, numbers: set[int]) -> list[Path]:
        """The files of numbers that are not there."""
        here = {number for number, _ in self._files()}
        return [self._data_dir / self.path(number) for number in sorted(numbers - here)]

    def newest(self) -> int:
        """The highest number of a file, 0 where there is none."""
        return max((number for number, _ in self._files()), default=0)

    def read(self, place: PackPlace, size_bytes: int, digest: str) -> bytes:
        """The bytes of a payload, its digest checked. Raises `StoreCorrupt`."""
        try:
            descriptor = self._opened(place.pack)
            try:
                data = os.pread(descriptor, size_bytes, place.offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreCorrupt(f"payload {digest} cannot be read ({error}): restore a backup") from error
        check_content(data, digest)
        return data

    def _opened(self, number: int) -> int:
        """A descriptor of the file of a number, which is nearly always a segment."""
        log, pack = (self._data_dir / name for name in _names(number))
        try:
            return open_file(log, os.O_RDONLY)
        except FileNotFoundError:
            return open_file(pack if pack.exists() else log, os.O_RDONLY)

    def remove_before(self, first: int) -> None:
        """Remove the files before this one: no row names any of them, and none is written any more."""
        with disk_errors("removing old payloads"):
            gone = [path for number, path in self._files() if number < first]
            for path in gone:
                path.unlink()
            for folder in {path.parent for path in gone}:
                sync_folder(folder)

    def _files(self) -> Iterator[tuple[int, Path]]:
        for folder, end in FOLDERS.items():
            for path in (self._data_dir / folder).glob(f"*{end}"):
                if path.stem.isdecimal():
                    yield int(path.stem), path


def _names(number: int) -> list[str]:
    """What a segment of this number is called, and what a pack."""
    return [f"{folder}/{number:06d}{end}" for folder, end in FOLDERS.items()]


def named_files(connection: Connection) -> tuple[set[str], set[int]]:
    """Where rows say that payloads lie: digests of those that are files of their own, numbers of packs."""
    u, payloads = updates.c, select(mask_sums.c.pack).where(mask_sums.c.pack.is_not(None))
    lies = select(u.pack, case((u.pack.is_(None), u.sha256))).where(u.payload.is_(None), ~u.flawed)
    rows = connection.execute(lies.distinct()).all()  # one look at all rows
    packs = {pack for pack, _ in rows if pack is not None}
    return {sha256 for _, sha256 in rows if sha256 is not None}, packs | set(connection.scalars(payloads))


def read_payload(row: Any, packs: Packs) -> bytes:
    """The bytes of a row of `updates` or `mask_sums` that has them, or their place. Raises `StoreCorrupt`."""
    if row.payload is None:
        return packs.read(PackPlace(row.pack, row.pack_offset), row.size_bytes, row.sha256)
    data: bytes = row.payload
    check_content(data, row.sha256)
    return data
