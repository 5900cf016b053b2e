"""How long to wait after failures in a row: twice as long each time, up to a bound."""

from __future__ import annotations

DOUBLINGS_MAX = 63  # 2.0**1024 overflows: what fails may fail for days


def backed_off_s(first_s: float, most_s: float, doublings: int) -> float:
    """`first_s` doubled so many times, `most_s` at most."""
    return min(most_s, first_s * 2.0 ** min(doublings, DOUBLINGS_MAX))
