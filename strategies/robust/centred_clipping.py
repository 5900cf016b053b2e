"""Centred clipping: the mean, of rows that are pulled to within a radius of the last result.

| symbol  | name       | meaning                                                       |
|---------|------------|---------------------------------------------------------------|
| x_i     | rows       | the rows                                                      |
| v       | before     | the result of the last buffer, 0 at first                     |
| tau     | radius     | clipping radius (0: the median of ||x_i - v||, at every pass) |
| L       | iterations | passes                                                        |

    v <- v + (1/n) sum_i (x_i - v) min(1, tau / ||x_i - v||),    L times

No row moves the result by more than L tau / n. A row was heard as far as the last pass left it: by
min(1, tau / ||x_i - v||). With sub-models the sum is, for each coordinate, over the n_j
rows that cover it.

Source: Karimireddy, He and Jaggi, "Learning from history for Byzantine robust optimization", ICML 2021; the
formula is recalled. There devices send momenta, which change slowly; here they send deltas. Ours: the radius
that follows the rows, and that several passes are the default then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anabranch.strategies.robust.rows import Floats, Rows, shortened


@dataclass(frozen=True)
class CentredClipping:
    """The mean of rows that are pulled to within a radius of the last result.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "centred_clipping"
    remembers: ClassVar[bool] = True

    radius: float = 0.0
    iterations: int = 8

    def combine(self, rows: Rows, before: Floats) -> Floats:
        """L passes from the last result."""
        v = before.copy()
        distances = rows.distances(v)
        for _ in range(self.iterations):
            tau = self.radius or float(np.median(distances))
            shares = shortened(tau, distances)
            rows.hear(shares)
            distances = rows.pull(shares, v)
        return v
