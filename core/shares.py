"""Whole parts of a count by a fraction as it is written: ceil(0.07 * 100) is 7, where floats make 8 of it."""

from __future__ import annotations

import math

from anabranch.core.rules import NEWEST

# More than floats are off by, and less than what anybody writes: true of results below 4 * 10^6, as a
# fraction times a count is off by 2^-52 of itself. Larger ones may still come out as floats have them.
SLACK = 1e-9


def ceil_of(fraction: float, count: int, rules: int = NEWEST) -> int:
    """ceil(fraction count). Without `rules` (`run.rules`) as floats have it."""
    return math.ceil(fraction * count - (SLACK if rules else 0.0))


def floor_of(fraction: float, count: int, rules: int = NEWEST) -> int:
    """floor(fraction count). Without `rules` (`run.rules`) as floats have it."""
    return math.floor(fraction * count + (SLACK if rules else 0.0))
