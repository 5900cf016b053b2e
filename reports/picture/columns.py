"""Rows of numbers that grow: an array for each column, so that a million of them fit and are sorted fast."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from anabranch.core.model.arrays import Array

FIRST_ROWS = 256


class Columns:
    """A table that grows by rows. `columns["name"]` is what there is of a column, for sums over all of it.

    `columns.cells["name"][row]` is one number of it, to read and to change: several times as fast as an
    array's. A new row may replace `cells`.
    """

    def __init__(self, **kinds: npt.DTypeLike) -> None:
        self._arrays: dict[str, Array] = {name: np.zeros(FIRST_ROWS, kind) for name, kind in kinds.items()}
        self._rows, self._room = 0, FIRST_ROWS
        self.cells = {name: _cells(array) for name, array in self._arrays.items()}

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name][: self._rows]

    def add(self, *values: float) -> int:
        """A new row, its values in the order of the columns; returns its number."""
        row = self._rows
        if row == self._room:
            self._grow()
        for cells, value in zip(self.cells.values(), values, strict=False):  # others were added later
            cells[row] = value
        self._rows = row + 1
        return row

    def insert(self, row: int, *values: float) -> None:
        """A new row before another one, or behind the last."""
        last = self.add(*values)
        if row < last:
            for array, value in zip(self._arrays.values(), values, strict=True):
                array[row + 1 : last + 1] = array[row:last].copy()
                array[row] = value

    def add_column(self, name: str, kind: npt.DTypeLike, fill: float) -> None:
        """Another column, with this value in the rows that there are."""
        self._arrays[name] = np.full(self._room, fill, kind)
        self.cells[name] = _cells(self._arrays[name])

    def has(self, name: str) -> bool:
        """Whether there is such a column."""
        return name in self._arrays

    def cut(self, rows: int) -> None:
        """Forget the rows after the first so many."""
        self._rows = min(self._rows, rows)

    @property
    def size_bytes(self) -> int:
        """What it takes of memory."""
        return sum(array.nbytes for array in self._arrays.values())

    def _grow(self) -> None:
        self._room *= 2
        for name, array in self._arrays.items():
            larger = np.zeros(self._room, array.dtype)
            larger[: self._rows] = array
            self._arrays[name] = larger
            self.cells[name] = _cells(larger)


class Texts:
    """Short texts by number, end to end: a million of them are two objects."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = Columns(end=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, text: str) -> None:
        """The next one."""
        self._bytes += text.encode()
        self._ends.add(len(self._bytes))

    def __getitem__(self, number: int) -> str:
        ends = self._ends.cells["end"]
        return self._bytes[ends[number - 1] if number else 0 : ends[number]].decode()

    @property
    def size_bytes(self) -> int:
        """What it takes of memory."""
        return len(self._bytes) + self._ends.size_bytes


def _cells(array: Array) -> Any:
    """The numbers of a column, one by one."""
    return memoryview(cast("Any", array))


def plain(values: Array) -> list[Any]:
    """As JSON has them: what is not finite is null."""
    found: list[Any] = values.tolist()
    if values.dtype.kind != "f" or bool(np.isfinite(values).all()):
        return found
    return [value if good else None for value, good in zip(found, np.isfinite(values), strict=True)]
