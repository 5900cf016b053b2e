"""Trimmed mean and median, coordinate by coordinate.

| symbol  | name      | meaning                                                      |
|---------|-----------|--------------------------------------------------------------|
| m       | counts    | rows that cover the coordinate                               |
| beta    | attackers | assumed fraction of hostile rows, less than 1/2              |
| x_i     | values    | the rows' values at the coordinate, x_(1) <= ... <= x_(m)    |

    trimmed mean:  f = floor(beta m),       (x_(f+1) + ... + x_(m-f)) / (m - 2 f)
    median:        f = floor((m - 1) / 2),  the same

With at most f hostile rows the result lies within the range of the honest ones. Both want dense updates:
where most values are zero because they were not sent (top-k), so is the result. A coordinate that one or two
rows cover has no majority; there the clip alone protects. A row was heard on so large a part of its
coordinates as its value lay within those that count.

Source: Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed learning: towards optimal
statistical rates", ICML 2018; the formulas are recalled. Ours: the count by coordinate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from anabranch.strategies.robust.rows import Floats, Rows

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of each coordinate without its least and greatest values.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "trimmed_mean"
    remembers: ClassVar[bool] = False

    attackers: float = 0.3

    def combine(self, rows: Rows, before: Floats) -> Floats:
        """The mean of what is left of each coordinate."""
        return _trimmed(rows, lambda m: np.floor(self.attackers * m + 1e-9).astype(np.int64))


@dataclass(frozen=True)
class Median:
    """The median of each coordinate.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "median"
    remembers: ClassVar[bool] = False

    def combine(self, rows: Rows, before: Floats) -> Floats:
        """The median of each coordinate."""
        return median(rows)


def median(rows: Rows) -> Floats:
    """The median of the rows that cover each coordinate, shape (size,)."""
    return _trimmed(rows, lambda m: np.maximum(m - 1, 0) // 2)


def _trimmed(rows: Rows, cut: Callable[[Counts], Any]) -> Floats:
    """The mean of the m - 2 f middle values; `cut` gives f for every m."""
    out, inside, covered = np.zeros(rows.size), np.zeros(len(rows)), np.zeros(len(rows))
    rank = np.arange(len(rows))[:, None]
    for block in rows.blocks():
        values, m, came = block.values, block.counts, block.values.copy()
        if block.covers is not None:
            values[~block.covers] = np.inf  # behind all that are covered
        values.sort(axis=0)
        f = cut(m)
        kept = (rank >= f) & (rank < m - f)
        summed = np.where(kept, values, 0.0).sum(axis=0)
        out[block.at] = summed / np.maximum(m - 2 * f, 1)
        within = _within(came, values, f, m)
        inside += np.count_nonzero(within if block.covers is None else within & block.covers, axis=1)
        covered += values.shape[1] if block.covers is None else np.count_nonzero(block.covers, axis=1)
    rows.hear(inside / np.maximum(covered, 1))
    return out


def _within(came: Floats, ordered: Floats, f: Counts, m: Counts) -> npt.NDArray[np.bool_]:
    """Which values lie between the least and the greatest of those that count, shape (n, b)."""
    least = np.take_along_axis(ordered, f[None, :], axis=0)
    greatest = np.take_along_axis(ordered, np.maximum(m - f - 1, 0)[None, :], axis=0)
    found: npt.NDArray[np.bool_] = (came >= least) & (came <= greatest)
    return found
