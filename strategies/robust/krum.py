"""Krum and multi-Krum: the rows that have the most others near them.

| symbol | name      | meaning                                                       |
|--------|-----------|---------------------------------------------------------------|
| n      | len(rows) | rows                                                          |
| f      | attackers | hostile rows: floor(attackers n), at most (n - 3) / 2         |
| m      | selected  | rows that are averaged (Krum: 1; 0: n - f)                    |

    score(i) = sum of the n - f - 2 smallest ||x_i - x_j||^2, j other than i
    result   = mean of the m rows of the smallest scores

Of rows with equal scores the first counts. n >= 2 f + 3 is needed; with fewer rows f is smaller.
With sub-models a distance is taken on what both rows cover; parts that share nothing (`ist`) tell nothing.

Source: Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine learning with adversaries: Byzantine tolerant
gradient descent", NeurIPS 2017; the formulas are recalled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from anabranch.core.config.tables import NO_KEY
from anabranch.strategies.robust.rows import Floats, Rows
from anabranch.strategies.robust.rule import hostile


@dataclass(frozen=True)
class MultiKrum:
    """The mean of the rows that have the most others near them.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "multi_krum"
    remembers: ClassVar[bool] = False

    attackers: float = 0.3
    selected: int = 0

    def combine(self, rows: Rows, before: Floats) -> Floats:
        """The mean of the rows that are best surrounded."""
        n = len(rows)
        f = max(0, min(hostile(self.attackers, n), (n - 3) // 2))
        chosen = self._best(rows.square_distances(), f)[: min(self.selected or n - f, n)]
        weights = np.zeros(n)
        weights[chosen] = 1.0
        rows.hear(weights)
        return rows.mean(weights)

    def _best(self, squares: Floats, f: int) -> list[int]:
        """The rows by their scores."""
        n = len(squares)
        others = np.sort(squares + np.diag(np.full(n, np.inf)), axis=1)
        scores = others[:, : max(min(n - f - 2, n - 1), 1)].sum(axis=1)
        return [int(i) for i in np.argsort(scores, kind="stable")]


@dataclass(frozen=True)
class Krum(MultiKrum):
    """Multi-Krum with m = 1."""

    name: ClassVar[str] = "krum"

    selected: int = field(default=1, metadata=NO_KEY)
