"""Intervals of paired differences, by the bootstrap."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
EXACT_MAX = 6  # of so few values every resample is taken: 6 ** 6 of them
DRAWS = 20_000


@dataclass(frozen=True)
class Interval:
    """A mean, and between what the means of `LEVEL` of all resamples lie."""

    mean: float
    low: float
    high: float

    @property
    def above(self) -> bool:
        """Whether all of it is over zero."""
        return self.low > 0

    @property
    def below(self) -> bool:
        """Whether all of it is under zero."""
        return self.high < 0

    def __str__(self) -> str:
        """In Markdown: bold where zero is not in it."""
        said = f"{self.mean:+.1f} ({self.low:+.1f} to {self.high:+.1f})"
        return f"**{said}**" if self.above or self.below else said


def bootstrap(values: Sequence[float]) -> Interval:
    """The percentile interval of the mean. Raises `ValueError` without a value.

    Of few values every resample is taken, each of which is as likely as any other, and nothing is drawn; of
    more, `DRAWS` from a fixed seed. Of five values such an interval is somewhat narrow: it cannot leave their
    range.
    """
    if not values:
        raise ValueError("an interval needs a value")
    count = len(values)
    if count <= EXACT_MAX:
        means = [statistics.fmean(found) for found in itertools.product(values, repeat=count)]
    else:
        drawn = np.random.default_rng(0).integers(count, size=(DRAWS, count))
        means = np.asarray(values)[drawn].mean(axis=1).tolist()
    ranked, tail = sorted(means), (1 - LEVEL) / 2
    low, high = math.floor(tail * len(ranked)), math.ceil((1 - tail) * len(ranked)) - 1
    return Interval(statistics.fmean(values), ranked[low], ranked[high])


def paired(mine: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """What one has more than the other, seed by seed, of the seeds that both have."""
    return [mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())]
