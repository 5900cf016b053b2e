"""Rows of a matrix as they are stored, and the loops over them, whoever runs those. Both give the same bits.

A row is a delta times a factor. It may be sparse, and it may cover a part of the coordinates only. No row is
ever spread out whole: a pass holds `BLOCK` coordinates of each. Sums are float64, down a column one row after
the other, along a row numpy's pairwise ones within a block and one block after the other, never BLAS's: a
replay on another machine gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from anabranch.core.model.arrays import Indices, Vector

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
BLOCK = 1 << 14  # coordinates; a block of twenty rows stays in a core's own cache


@dataclass(frozen=True, eq=False)
class TableRow:
    """`scale * values` at `places`, 0 elsewhere on what is covered.

    Both `places`, those of `values`, and `covered` are increasing; None: every coordinate.
    """

    values: Vector
    scale: float
    places: Indices | None = None
    covered: Indices | None = None

    def fill(self, start: int, stop: int, values: npt.NDArray[Any], covers: Flags | None) -> None:
        """Write the coordinates from `start` to `stop`; `values` are zeros and `covers` true before."""
        if self.places is None:
            np.multiply(self.values[start:stop], self.scale, out=values, dtype=np.float64)
        else:
            first, last = np.searchsorted(self.places, (start, stop))
            there = self.places[first:last] - start
            values[there] = np.multiply(self.values[first:last], self.scale, dtype=np.float64)
        if covers is not None and self.covered is not None:
            first, last = np.searchsorted(self.covered, (start, stop))
            covers[:] = False
            covers[self.covered[first:last] - start] = True


@dataclass(frozen=True, eq=False)
class Block:
    """The coordinates `at` of every row: `values` (n, b), 0 where not covered; `covers` (n, b), None: all."""

    at: slice
    values: Floats
    covers: Flags | None

    @property
    def counts(self) -> Counts:
        """How many rows cover each coordinate, shape (b,)."""
        if self.covers is None:
            return np.full(self.values.shape[1], len(self.values), np.int64)
        counted: Counts = self.covers.sum(axis=0, dtype=np.int64)
        return counted

    def weights(self, row_weights: Floats) -> Floats:
        """Each row's weight on each coordinate: 0 where not covered; (n, 1) where all rows are whole."""
        column = row_weights[:, None]
        return column if self.covers is None else np.where(self.covers, column, 0.0)


@dataclass(frozen=True, eq=False)
class RowTable:
    """Rows of `size` coordinates."""

    rows: Sequence[TableRow]
    size: int

    @property
    def partial(self) -> bool:
        """Whether there is a row that does not cover all."""
        return any(row.covered is not None for row in self.rows)

    def blocks(self) -> Iterator[Block]:
        """All coordinates, in order."""
        partial = self.partial
        for start in range(0, self.size, BLOCK):
            stop = min(start + BLOCK, self.size)
            values = np.zeros((len(self.rows), stop - start))
            covers = np.ones(values.shape, np.bool_) if partial else None
            for i, row in enumerate(self.rows):
                row.fill(start, stop, values[i], None if covers is None else covers[i])
            yield Block(slice(start, stop), values, covers)


class TableLoops(Protocol):
    """The loops. Values are finite."""

    def row_squares(self, table: RowTable, centre: Floats) -> Floats:
        """Of each row its squared distance from `centre` (size,) on what it covers, shape (n,)."""
        ...

    def pair_squares(self, table: RowTable) -> tuple[Floats, Floats]:
        """Of two rows each, i before j: the squared distance on what both cover, how much that is; (n, n)."""
        ...

    def row_mean(self, table: RowTable, weights: Floats) -> Floats:
        """The weighted mean of the rows that cover each coordinate, (size,); 0 where weights come to 0."""
        ...

    def row_step(self, table: RowTable, weights: Floats, centre: Floats | None, out: Floats) -> Floats:
        """Write a new centre to `out` (size,), which may be `centre`; returns `row_squares` of it.

        Without a centre the new one is `row_mean`; else it is the old one and, of the rows that cover each
        coordinate, the mean of weight * (value - centre), or 0 where none does.
        """
        ...

    def row_middle(self, table: RowTable, cuts: Counts) -> tuple[Floats, Counts]:
        """The mean of the values in the middle, (size,), and how many of each row's lie there, (n,).

        Of a coordinate that m rows cover the least `cuts[m]` are left out, and as many greatest ones.
        """
        ...


def sum_of(weights: Floats) -> float:
    """What weights (n,) come to, added down a column of one."""
    return float(weights[:, None].sum(axis=0)[0])


@lru_cache(maxsize=64)
def network(n: int, first: int, last: int) -> Counts:
    """Exchanges that put the `first` to the `last` of n numbers in order in their places, (steps, 2).

    One after the other; of two the smaller goes to the first place. They are Batcher's (1968, the odd-even
    merge sort, by Knuth's algorithm 5.2.2M) without those that lead to no wanted place.
    """
    wanted, kept = set(range(first, last + 1)), []
    for i, j in reversed(list(_exchanges(n))):
        if i in wanted or j in wanted:
            wanted |= {i, j}
            kept.append((i, j))
    return np.array(kept[::-1], np.int64).reshape(-1, 2)


def _exchanges(n: int) -> Iterator[tuple[int, int]]:
    top = 1 << max(0, (n - 1).bit_length() - 1)
    p = top if n > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            yield from ((i, i + d) for i in range(n - d) if i & p == r)
            if q == p:
                break
            q, r, d = q >> 1, p, q - p
        p >>= 1
