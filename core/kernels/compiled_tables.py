"""The loops over rows compiled (`table.c`).

What they are not for (another dtype, rows of a part of the coordinates) is left to their twins in
`plain_tables`.
"""

from __future__ import annotations

import numpy as np

from anabranch.core.kernels import _loops, plain_tables
from anabranch.core.kernels.table import BLOCK, Counts, Floats, RowTable, network, sum_of
from anabranch.core.model.arrays import Indices, Vector

Plain = tuple[tuple[Vector, Indices | None, float], ...]
FLOAT32, INT64 = np.dtype(np.float32), np.dtype(np.int64)


def row_squares(table: RowTable, centre: Floats) -> Floats:
    """See `TableLoops`."""
    rows, sums = _plain(table), np.empty((_blocks(table), len(table.rows)))
    if rows and _loops.row_squares(rows, BLOCK, 0, table.size, _doubles(centre), sums):
        return _in_order(sums)
    return plain_tables.row_squares(table, centre)


def pair_squares(table: RowTable) -> tuple[Floats, Floats]:
    """See `TableLoops`."""
    n, rows = len(table.rows), _plain(table)
    above = np.triu(np.ones((n, n), np.bool_), 1)
    sums = np.empty((_blocks(table), n * (n - 1) // 2))
    if not (rows and _loops.pair_squares(rows, BLOCK, 0, table.size, sums)):
        return plain_tables.pair_squares(table)
    squares = np.zeros((n, n))
    squares[above] = _in_order(sums)
    return squares, np.where(above, float(table.size), 0.0)


def row_mean(table: RowTable, weights: Floats) -> Floats:
    """See `TableLoops`."""
    rows, total, out = _plain(table), sum_of(weights), np.empty(table.size)
    given = _doubles(weights)
    if rows and total > 0 and _loops.row_mean(rows, BLOCK, 0, table.size, given, total, None, out, None):
        return out
    return plain_tables.row_mean(table, weights)


def row_step(table: RowTable, weights: Floats, centre: Floats | None, out: Floats) -> Floats:
    """See `TableLoops`."""
    rows, sums = _plain(table), np.empty((_blocks(table), len(table.rows)))
    divisor = sum_of(weights) if centre is None else float(len(table.rows))
    given, start = _doubles(weights), None if centre is None else _doubles(centre)
    plain = out is _doubles(out) and divisor > 0
    if rows and plain and _loops.row_mean(rows, BLOCK, 0, table.size, given, divisor, start, out, sums):
        return _in_order(sums)
    return plain_tables.row_step(table, weights, centre, out)


def row_middle(table: RowTable, cuts: Counts) -> tuple[Floats, Counts]:
    """See `TableLoops`."""
    n, rows = len(table.rows), _plain(table)
    out, inside, first = np.empty(table.size), np.zeros(n, np.int64), int(cuts[n])
    exchanges = network(n, first, n - first - 1)
    if rows and _loops.row_middle(rows, exchanges, first, n - first - 1, 0, table.size, out, inside):
        return out, inside
    return plain_tables.row_middle(table, cuts)


def _plain(table: RowTable) -> Plain | None:
    """What the compiled loops take; None where they are not for it.

    A column that is a block by itself numpy adds up pairwise, as it lies in memory like a row.
    """
    ours = table.size % BLOCK != 1 and all(
        row.covered is None
        and row.values.dtype == FLOAT32
        and row.values.flags.c_contiguous
        and (row.places is None or (row.places.dtype == INT64 and row.places.flags.c_contiguous))
        for row in table.rows
    )
    return tuple((row.values, row.places, row.scale) for row in table.rows) if ours else None


def _doubles(values: Floats) -> Floats:
    return np.asarray(values, np.float64, order="C")


def _blocks(table: RowTable) -> int:
    return -(-table.size // BLOCK)


def _in_order(sums: Floats) -> Floats:
    """The sums of blocks (blocks, k), added one after the other."""
    out = np.zeros(sums.shape[1])
    for of_block in sums:
        out += of_block
    return out
