"""How well a few values know their mean: Student's interval, exact for whole degrees of freedom.

| symbol | meaning                                                                      |
|--------|------------------------------------------------------------------------------|
| nu     | degrees of freedom, one less than there are values                           |
| A      | the probability that |t| is at most so large                                 |
| theta  | atan(t / sqrt(nu))                                                           |

    A = 2 theta / pi                                                     for nu = 1
    A = 2/pi (theta + sin theta (cos theta + 2/3 cos^3 theta + ... ))    for nu odd
    A = sin theta (1 + 1/2 cos^2 theta + 1*3/(2*4) cos^4 theta + ... )   for nu even

up to the power nu - 2 of the cosine. Source: Abramowitz and Stegun, "Handbook of Mathematical Functions",
26.7.3 and 26.7.4, as recalled; the test compares it with another library's.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence

LEVEL = 0.95


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Where the mean is that these were drawn about, by the probability `LEVEL`; None of less than two."""
    if len(values) < 2:
        return None
    middle, wide = mean(values), t_quantile(len(values) - 1, LEVEL)
    half = wide * deviation(values) / math.sqrt(len(values))
    return middle - half, middle + half


def mean(values: Sequence[float]) -> float:
    """Of finite numbers, of which the sum may be none: a model that comes apart passes through such."""
    try:
        return statistics.fmean(values)
    except OverflowError:
        return float(statistics.mean(values))


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation, 0 of one value; the largest float where it is larger than any."""
    try:
        return statistics.stdev(values) if len(values) > 1 else 0.0
    except OverflowError:
        return sys.float_info.max


def t_quantile(freedom: int, level: float) -> float:
    """The t that |t| is at most by this probability, of so many degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):  # halvings: more than a float has digits
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(freedom, middle) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _probability(freedom: int, theta: float) -> float:
    """A."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
