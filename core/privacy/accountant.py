"""What a private run promises: (epsilon, delta) of the exact Gaussian curve, noise correlated or not.

| symbol | name           | meaning                                                                |
|--------|----------------|------------------------------------------------------------------------|
| z      | noise          | standard deviation of the noise, in clips                              |
| k      | participations | updates of one device in the run, at most                              |
| m      | bands          | releases whose noise is correlated; 1: independent noise               |
| c      |                | (m,), the square root of the matrix of prefix sums, its first m bands  |
| mu     |                | how far apart the two cases are, in standard deviations                |

    c_0 = 1,  c_j = c_{j-1} (2j - 1) / (2j)
    mu = sqrt(k) |c|_2 / z                          # m at most the separation of a device's updates
    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

With m <= the separation no two updates of one device meet in one column of the matrix, so their lengths add
up squared. The last columns of a run are shorter: mu is a bound, whatever the length of the run. Inputs
may be chosen by what was published before, since the matrix is lower-triangular.

Sources: Balle and Wang, "Improving the Gaussian mechanism for differential privacy", ICML 2018, theorem 8,
for the curve; Fichtenberger, Henzinger and Upadhyay, "Constant matters", arXiv 2202.11205, for the square
root; Choquette-Choo et al., "(Amplified) banded matrix factorization", arXiv 2306.08153, for bands and
separation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

MILLS_FROM = 25.0  # beyond, erfc has no digits left, and the series has all of them


def coefficients(bands: int) -> list[float]:
    """c: the first `bands` coefficients, exact for as many as a float holds."""
    found = [1.0]
    for j in range(1, bands):
        found.append(found[-1] * (2 * j - 1) / (2 * j))
    return found


def sensitivity(bands: int, participations: int) -> float:
    """How far one device moves all releases together, in clips; `bands` at most its separation."""
    return math.sqrt(participations * math.fsum(c * c for c in coefficients(bands)))


def delta_of(epsilon: float, mu: float) -> float:
    """The delta that goes with an epsilon >= 0 at mu > 0."""
    near, far = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    # e^epsilon is the ratio of the densities at `near` and `far`: so nothing overflows.
    return max(0.0, _upper_tail(near) - _density(near) * _mills(far))


def epsilon_of(mu: float, delta: float) -> float:
    """The least epsilon for a delta in (0, 1), to 1e-9 of itself; 0 where mu is so small."""
    if mu == 0 or delta_of(0.0, mu) <= delta:
        return 0.0
    return _turn(lambda epsilon: delta_of(epsilon, mu) > delta)[1]


def mu_of(epsilon: float, delta: float) -> float:
    """The greatest mu whose epsilon, for this delta, is no more than this one."""
    return _turn(lambda mu: delta_of(epsilon, mu) <= delta)[0]


def _turn(is_before: Callable[[float], bool]) -> tuple[float, float]:
    """Between which two numbers, to 1e-10 of themselves, something ends that holds from 0 up to there."""
    low, high = 0.0, 1.0
    while is_before(high):
        low, high = high, 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_before(middle) else (low, middle)
    return low, high


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _upper_tail(x: float) -> float:
    """Phi(-x)."""
    return math.erfc(x / math.sqrt(2)) / 2


def _mills(x: float) -> float:
    """Phi(-x) over the density at x: Mills' ratio, for x > 0."""
    if x < MILLS_FROM:
        return _upper_tail(x) / _density(x)
    term = total = 1.0
    for n in range(1, 12):
        term *= -(2 * n - 1) / (x * x)
        total += term
    return total / x
