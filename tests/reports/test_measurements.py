"""What a picture keeps of measurements, against a plain dictionary of them."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from anabranch.reports.picture.measurements import Measurements

VERSIONS = st.integers(0, 12)
METRICS = st.dictionaries(st.sampled_from("abc"), st.none() | st.floats(-1e300, 1e300), max_size=3)
ADD = st.tuples(st.just("add"), VERSIONS, METRICS)
CUT = st.tuples(st.just("cut"), VERSIONS, METRICS)
STEPS = st.lists(ADD | CUT)


@given(STEPS)
def test_it_has_the_later_measurement_of_each_version_that_is_left(
    steps: list[tuple[str, int, dict[str, float | None]]],
) -> None:
    measured, plain = Measurements(), dict[str, dict[int, float | None]]()
    for what, version, metrics in steps:
        if what == "add":
            measured.add(version, metrics)
            for name, value in metrics.items():
                plain.setdefault(name, {})[version] = value
        else:
            measured.cut(version)
            plain = {n: {v: x for v, x in of.items() if v <= version} for n, of in plain.items()}
    assert sorted(measured.names) == sorted(name for name, of in plain.items() if of)
    for name in measured.names:
        versions, values = measured.of(name)
        told = [None if math.isnan(value) else value for value in values.tolist()]
        assert list(zip(versions.tolist(), told, strict=True)) == sorted(plain[name].items())
        known = [value for value in plain[name].values() if value is not None]
        assert measured.best(name, greater=True) == max(known, default=None)
        assert measured.best(name, greater=False) == min(known, default=None)


def test_of_a_metric_that_nobody_measured_there_is_no_best() -> None:
    assert Measurements().best("accuracy", greater=True) is None
