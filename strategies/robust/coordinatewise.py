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

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anabranch.strategies.robust.rows import Floats, Rows


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
        m = np.arange(len(rows) + 1)
        return rows.middle(np.floor(self.attackers * m + 1e-9).astype(np.int64))


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
    return rows.middle(np.maximum(np.arange(len(rows) + 1) - 1, 0) // 2)
