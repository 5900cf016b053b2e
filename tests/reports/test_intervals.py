"""Student's interval, against scipy's quantiles and the closed forms of one and two degrees of freedom."""

from __future__ import annotations

import math
import statistics

import pytest

from anabranch.reports.intervals import mean_interval, t_quantile


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 8, 29, 100])
def test_the_quantile_is_that_of_scipy(freedom: int, level: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert t_quantile(freedom, level) == pytest.approx(stats.t.ppf((1 + level) / 2, freedom), rel=1e-9)


def test_the_quantile_is_what_the_closed_forms_say() -> None:
    for level in (0.1, 0.5, 0.95, 0.99):
        assert t_quantile(1, level) == pytest.approx(math.tan(math.pi * level / 2), rel=1e-9)
        assert t_quantile(2, level) == pytest.approx(level * math.sqrt(2 / (1 - level**2)), rel=1e-9)


def test_the_interval_is_about_the_mean() -> None:
    values = [0.7, 0.75, 0.8]
    low, high = mean_interval(values) or (0.0, 0.0)
    assert (low + high) / 2 == pytest.approx(0.75)
    assert high - low == pytest.approx(2 * t_quantile(2, 0.95) * statistics.stdev(values) / math.sqrt(3))
    assert mean_interval([0.5]) is None
