"""Whole parts of a count by a fraction as it is written: ceil(0.07 * 100) is 7, where floats make 8 of it."""

from __future__ import annotations

import math

from anabranch.core.rules import NEWEST

SLACK = 1e-9  # more than floats are off by, and less than what anybody writes


def ceil_of(fraction: float, count: int, rules: int = NEWEST) -> int:
    """ceil(fraction count). Without `rules` (`run.rules`) as floats have it."""
    return math.ceil(fraction * count - (SLACK if rules else 0.0))


def floor_of(fraction: float, count: int, rules: int = NEWEST) -> int:
    """floor(fraction count). Without `rules` (`run.rules`) as floats have it."""
    return math.floor(fraction * count + (SLACK if rules else 0.0))
