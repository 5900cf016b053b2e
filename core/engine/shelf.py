"""A shelf: where vectors lie that a strategy remembers and a state need not hold.

The state has a reference in the place of each, which is named by what it stands for: the SHA-256 of its
bytes. So a state stays a value, equal for whoever comes to the same vectors, wherever they lie, and what
comes back from a shelf has the bits and the kind (dense or sparse) of what was put there.

    row    "densrow1" | "sparrow1", dtype (8 bytes), size, count (8 bytes each, little-endian)
           values (count,), and of a sparse one indices (count,) int64; little-endian

A vector stays on the shelf as long as anybody has its reference, or a snapshot that is kept names it. To put
one there is no event: the log has whatever it was made of, and a replay puts it there again.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from anabranch.core.errors import StoreCorrupt
from anabranch.core.model.arrays import little, to_bytes
from anabranch.core.model.params import Delta, SparseVector, Vector

HEADER = struct.Struct("<8s8sQQ")
DENSE, SPARSE = b"densrow1", b"sparrow1"
ROW = "$row"  # the key under which the name of a vector on the shelf stays in the JSON of a state


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Shelved:
    """The reference of a vector on a shelf: the SHA-256 (hex) of its row, and how many coordinates it has.

    There is one for each row: the shelf, which made it, counts on that.
    """

    sha256: str
    size: int

    def __deepcopy__(self, _: Any) -> Self:
        """A copied state refers to the same row."""
        return self


Remembered = Vector | SparseVector | Shelved


class Shelf(Protocol):
    """Where vectors lie. When they are written is its own affair; equal calls give equal results."""

    def put(self, delta: Delta) -> Shelved:
        """The reference of a vector, which is on the shelf now."""
        ...

    def take(self, row: Shelved) -> Delta:
        """The vector of a reference, to be read; it stays where it is. Raises `StoreCorrupt`."""
        ...

    def named(self, sha256: str, size: int) -> Shelved:
        """The reference that a snapshot has by its name."""
        ...


def row_of(delta: Delta) -> list[bytes | memoryview]:
    """The bytes of a vector as it is, in pieces: views of its arrays where they are as they shall be."""
    is_sparse = isinstance(delta, SparseVector)
    values = delta.values if isinstance(delta, SparseVector) else delta
    dtype = little(values.dtype).str.encode()
    head = HEADER.pack(SPARSE if is_sparse else DENSE, dtype, delta.size, values.size)
    pieces: list[bytes | memoryview] = [head, to_bytes(values)]
    if isinstance(delta, SparseVector):
        pieces.append(to_bytes(delta.indices))
    return pieces


def name_of(row: list[bytes | memoryview]) -> str:
    """The SHA-256 of a row, in hex."""
    sha = hashlib.sha256()
    for piece in row:
        sha.update(piece)
    return sha.hexdigest()


def delta_of(data: bytes | memoryview) -> Delta:
    """The vector of a row, which has its digest; read-only, as views of the bytes."""
    kind, dtype, size, count = HEADER.unpack_from(data)
    stored = np.dtype(dtype.rstrip(b"\0").decode())
    values = np.frombuffer(data, stored, count, HEADER.size).astype(stored.newbyteorder("="), copy=False)
    if kind == DENSE:
        return values
    indices = np.frombuffer(data, "<i8", count, HEADER.size + values.nbytes)
    return SparseVector(indices.astype(np.int64, copy=False), values, size)


class Described(Protocol):
    """Where rows lie, in words. To ask for these may take a while."""

    @property
    def remedy(self) -> str:
        """What to do about a row that is damaged or lost."""
        ...

    def place(self, sha256: str) -> str:
        """Where a row is."""
        ...


def check_row(sha256: str, data: bytes | memoryview, rows: Described) -> None:
    """Raises `StoreCorrupt` where a row of these has another digest than its name."""
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise StoreCorrupt(
            f"{rows.place(sha256)} has the SHA-256 {found[:16]}..., not that of its name: what a strategy "
            f"remembers of a device is damaged. {rows.remedy}"
        )


def rows_named(plain: Any) -> Iterator[str]:
    """The names of all rows in the JSON of a snapshot."""
    if isinstance(plain, Mapping):
        if ROW in plain:
            yield plain[ROW]
            return
        plain = plain.values()
    elif not isinstance(plain, list | tuple):
        return
    for value in plain:
        if not isinstance(value, str | int | float):
            yield from rows_named(value)
