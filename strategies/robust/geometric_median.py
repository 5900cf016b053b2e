"""Geometric median: the point whose distances to all rows have the smallest sum.

| symbol  | name       | meaning                                       |
|---------|------------|-----------------------------------------------|
| x_i     | rows       | the rows                                      |
| v       | centre     | the estimate                                  |
| nu      | SMOOTHING  | a smallest distance, in median ones             |
| R       | iterations | passes                                        |

    beta_i = 1 / max(nu, ||v - x_i||)
    v      = sum_i beta_i x_i / sum_i beta_i,    R times

As long as fewer than half of the rows are hostile the result stays near the honest ones, whatever the others
are. With sub-models the sums are, for each coordinate, over the rows that cover it. A row was heard by its
beta_i in the last pass beside that of the row in the middle, whole where it is nearer.

Source: Pillutla, Kakade and Harchaoui, "Robust aggregation for federated learning", IEEE Transactions on
Signal Processing 2022 (the smoothed Weiszfeld algorithm); the formulas are recalled. Ours: v starts from the
coordinate-wise median, so that rows which are far away cost no passes; equal weights, since a device may
claim any number of examples; nu is relative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anabranch.strategies.robust.coordinatewise import median
from anabranch.strategies.robust.rows import Floats, Rows, shortened

SMOOTHING = 1e-6
LEAST = 1e-100  # where all rows are one


@dataclass(frozen=True)
class GeometricMedian:
    """The point whose distances to all rows have the smallest sum, by Weiszfeld's algorithm.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "geometric_median"
    remembers: ClassVar[bool] = False

    iterations: int = 8

    def combine(self, rows: Rows, before: Floats) -> Floats:
        """R steps of Weiszfeld's algorithm."""
        v = median(rows)
        distances = rows.distances(v)
        for _ in range(self.iterations):
            middle = float(np.median(distances))
            rows.hear(shortened(middle, distances))
            distances = rows.to_mean(1.0 / np.maximum(distances, max(SMOOTHING * middle, LEAST)), v)
        return v
