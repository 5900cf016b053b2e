"""The loops over rows by numpy: what runs without a compiler, and what the compiled ones are held to."""

from __future__ import annotations

import numpy as np

from anabranch.core.kernels.table import Block, Counts, Flags, Floats, RowTable


def row_squares(table: RowTable, centre: Floats) -> Floats:
    """See `TableLoops`."""
    squares = np.zeros(len(table.rows))
    for block in table.blocks():
        apart = block.values - centre[block.at]
        if block.covers is not None:
            apart[~block.covers] = 0.0
        squares += np.square(apart).sum(axis=1)
    return squares


def pair_squares(table: RowTable) -> tuple[Floats, Floats]:
    """See `TableLoops`."""
    n = len(table.rows)
    squares, shared = np.zeros((n, n)), np.zeros((n, n))
    for block in table.blocks():
        for i in range(n):
            apart = block.values[i] - block.values[i + 1 :]
            if block.covers is None:
                shared[i, i + 1 :] += apart.shape[1]
            else:
                both = block.covers[i] & block.covers[i + 1 :]
                apart[~both] = 0.0
                shared[i, i + 1 :] += np.count_nonzero(both, axis=1)
            squares[i, i + 1 :] += np.square(apart).sum(axis=1)
    return squares, shared


def row_mean(table: RowTable, weights: Floats) -> Floats:
    """See `TableLoops`."""
    out = np.zeros(table.size)
    for block in table.blocks():
        shares = block.weights(weights)
        total = np.broadcast_to(shares.sum(axis=0), out[block.at].shape)
        summed = (shares * block.values).sum(axis=0)
        np.divide(summed, total, out=out[block.at], where=total > 0)
    return out


def row_step(table: RowTable, weights: Floats, centre: Floats | None, out: Floats) -> Floats:
    """See `TableLoops`."""
    if centre is None:
        np.copyto(out, row_mean(table, weights))
        return row_squares(table, out)
    for block in table.blocks():
        here, counts = centre[block.at], block.counts
        pulls = (block.weights(weights) * (block.values - here)).sum(axis=0)
        out[block.at] = np.where(counts > 0, here + pulls / np.maximum(counts, 1), 0.0)
    return row_squares(table, out)


def row_middle(table: RowTable, cuts: Counts) -> tuple[Floats, Counts]:
    """See `TableLoops`."""
    n = len(table.rows)
    out, inside, rank = np.zeros(table.size), np.zeros(n, np.int64), np.arange(n)[:, None]
    for block in table.blocks():
        ordered, m = block.values.copy(), block.counts
        if block.covers is not None:
            ordered[~block.covers] = np.inf  # behind all that are covered
        ordered.sort(axis=0)
        f = cuts[m]
        kept = (rank >= f) & (rank < m - f)
        summed = np.where(kept, ordered, 0.0).sum(axis=0)
        out[block.at] = summed / np.maximum(m - 2 * f, 1)
        inside += np.count_nonzero(_within(block, ordered, f, m), axis=1)
    return out, inside


def _within(block: Block, ordered: Floats, f: Counts, m: Counts) -> Flags:
    """Which covered values lie between the least and the greatest of those that count, shape (n, b)."""
    least = np.take_along_axis(ordered, f[None, :], axis=0)
    greatest = np.take_along_axis(ordered, np.maximum(m - f - 1, 0)[None, :], axis=0)
    found: Flags = (block.values >= least) & (block.values <= greatest)
    return found if block.covers is None else found & block.covers
