"""Values that lie in a mapped file, read block after block: the pages behind are given back to the system.

A page that was looked at counts as the process's own memory until it is unmapped, so an update as large as
the model would cost a model more. The system keeps the file in its cache: to read it again takes no longer.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Self

import numpy as np

from anabranch.core.model.arrays import Array

PASS_VALUES = 1 << 20


class MappedFile(mmap.mmap):
    """A file mapped to be read. Only such pages are given back: of others changes would be lost."""

    def __new__(cls, descriptor: int) -> Self:
        """All of the open file, which must not be empty."""
        return super().__new__(cls, descriptor, 0, access=mmap.ACCESS_READ)


def passes(values: Array) -> Iterator[slice]:
    """Slices of flat values, in order, together all of them; use each before the next is asked for.

    Behind each the pages are given back where the values lie in a `MappedFile`; elsewhere one slice is all.
    """
    file = _file_of(values) if values.size else None
    if file is None or not hasattr(mmap, "MADV_DONTNEED"):
        yield slice(0, values.size)
        return
    begin, width = _address(values) - _address(np.frombuffer(file, np.uint8)), values.itemsize
    for at in range(0, values.size, PASS_VALUES):
        end = min(at + PASS_VALUES, values.size)
        yield slice(at, end)
        first = (begin + at * width) // mmap.PAGESIZE * mmap.PAGESIZE
        file.madvise(mmap.MADV_DONTNEED, first, begin + end * width - first)


def _file_of(values: Array) -> MappedFile | None:
    if not values.flags.c_contiguous:
        return None
    owner: object = values
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner if isinstance(owner, MappedFile) else None


def _address(values: Array) -> int:
    return int(values.__array_interface__["data"][0])
