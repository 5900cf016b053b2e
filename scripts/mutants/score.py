"""What a sample says of the whole: the share of the mutants that the tests notice, with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.96  # 95 %


@dataclass(frozen=True)
class Score:
    """Of one file: `tried` of its `mutants` were tried and `noticed` of these noticed."""

    file: str
    mutants: int
    tried: int
    noticed: int

    @property
    def share(self) -> float:
        """1 where there was nothing to notice."""
        return self.noticed / self.tried if self.tried else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval; the share itself where all mutants were tried."""
        if self.tried >= self.mutants:
            return self.share, self.share
        n, p = self.tried, self.share
        centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return centre - half, centre + half


def overall(scores: Sequence[Score]) -> tuple[float, float]:
    """The share of all mutants that is noticed, and half the width of its interval.

    Each file counts by its mutants, however many of them were tried: the estimate of a stratified sample. A
    file where all that were tried were noticed has the variance of Agresti and Coull's share, not none.
    """
    total = sum(s.mutants for s in scores)
    share = sum(s.mutants * s.share for s in scores) / total
    variance = 0.0
    for s in scores:
        if s.tried < s.mutants:
            p = (s.noticed + 2) / (s.tried + 4)
            variance += (s.mutants / total) ** 2 * p * (1 - p) / s.tried * (1 - s.tried / s.mutants)
    return share, Z * math.sqrt(variance)
