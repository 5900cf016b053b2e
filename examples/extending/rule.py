"""A robust rule of one's own: the mean of the rows, each cut to the length of the median row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anabranch.strategies.robust.rows import Floats, Rows


@dataclass(frozen=True)
class NormBound:
    name: ClassVar[str] = "norm_bound"
    remembers: ClassVar[bool] = False
    attackers: float = 0.3  # a field is the key of [robust] that has its name

    def combine(self, rows: Rows, before: Floats) -> Floats:
        lengths = rows.distances(np.zeros(rows.size))
        bound = np.quantile(lengths, 1.0 - max(0.5, self.attackers))
        cut = np.minimum(1.0, bound / np.maximum(lengths, 1e-30))
        rows.hear(cut)  # for operators: whom the rule has left out how far
        found: Floats = rows.mean(cut) * cut.mean()
        return found
