"""Every rule: the order does not matter, and a minority of rows cannot lead the result astray."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from anabranch.core.engine.robust import RobustTable
from anabranch.strategies.robust.registry import BUILT_IN as RULES
from anabranch.strategies.robust.registry import make_rule
from anabranch.strategies.robust.rule import Rule
from anabranch.testing.rule import check_order, rows_of

SIZE = 6
MAGNITUDES = (0.0, 1.0, 1e3, 1e10)


def rule_of(name: str) -> Rule:
    rule = make_rule(RobustTable(rule=name, attackers=0.4, iterations=12))
    assert rule is not None
    return rule


@st.composite
def honest_and_hostile(draw: Any, share: float) -> tuple[Any, Any]:
    """Honest rows around a common direction, and fewer hostile ones, of any size."""
    n = draw(st.integers(3, 12))
    f = draw(st.integers(0, int(share * n)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    centre = rng.standard_normal(SIZE)
    honest = centre + 0.3 * rng.standard_normal((n - f, SIZE))
    kind = draw(st.sampled_from(["same", "apart", "flipped"]))
    size = draw(st.sampled_from(MAGNITUDES))
    hostile = {
        "same": np.tile(rng.standard_normal(SIZE), (f, 1)) * size,
        "apart": rng.standard_normal((f, SIZE)) * size,
        "flipped": np.tile(-centre, (f, 1)) * size,
    }[kind]
    return honest, hostile


@pytest.mark.parametrize("name", tuple(RULES))
@settings(max_examples=25)
@given(case=honest_and_hostile(0.4), seed=st.integers(0, 2**32))
def test_the_order_of_the_rows_does_not_matter(name: str, case: Any, seed: int) -> None:
    matrix = np.concatenate(case)
    # Of three rows two are each other's nearest; four may be mixed to two and two that are equal: ties.
    assume(len(matrix) > {"krum": 3, "neighbour_mixing": 4}.get(name, 0))
    check_order(rule_of(name), matrix, seed)


@pytest.mark.parametrize("name", ["trimmed_mean", "median"])
@settings(max_examples=60)
@given(case=honest_and_hostile(0.4))
def test_a_coordinate_stays_within_the_range_of_the_honest_rows(name: str, case: Any) -> None:
    honest = case[0].astype(np.float32)
    found = rule_of(name).combine(rows_of(np.concatenate(case)), np.zeros(SIZE))
    assert (found >= honest.min(axis=0) - 1e-6).all()
    assert (found <= honest.max(axis=0) + 1e-6).all()


@pytest.mark.parametrize(
    ("name", "share", "times"),
    [("geometric_median", 0.4, 6.0), ("krum", 0.3, 3.0), ("neighbour_mixing", 0.4, 18.0)],
)
@settings(max_examples=60)
@given(data=st.data())
def test_the_result_stays_near_the_honest_rows(name: str, share: float, times: float, data: Any) -> None:
    """At most (1 - beta) 2 / (1 - 2 beta) honest radii for the geometric median: 6 of them at beta = 0.4.

    A row's neighbours are no farther from it than two radii: those of an honest one, three from the middle.
    """
    honest, hostile = data.draw(honest_and_hostile(share))
    if name == "krum" and len(honest) + len(hostile) < 2 * len(hostile) + 3:
        return  # beyond what it promises
    middle = honest.mean(axis=0)
    radius = np.linalg.norm(honest - middle, axis=1).max()
    found = rule_of(name).combine(rows_of(np.concatenate([honest, hostile])), np.zeros(SIZE))
    assert np.linalg.norm(found - middle) <= times * radius + 1e-3


@settings(max_examples=60)
@given(case=honest_and_hostile(0.4), tau=st.floats(0.01, 10.0))
def test_centred_clipping_moves_no_further_than_its_radius(case: Any, tau: float) -> None:
    rule = make_rule(RobustTable(rule="centred_clipping", radius=tau, iterations=3))
    assert rule is not None
    start = np.ones(SIZE)
    assert np.linalg.norm(rule.combine(rows_of(np.concatenate(case)), start) - start) <= 3 * tau * (1 + 1e-9)


@pytest.mark.parametrize("name", tuple(RULES))
@given(value=st.floats(-1e6, 1e6, width=32), n=st.integers(1, 9))
@settings(max_examples=25)
def test_rows_that_agree_are_the_result(name: str, value: float, n: int) -> None:
    rule = make_rule(RobustTable(rule=name, radius=0.0, iterations=60))
    assert rule is not None
    found = rule.combine(rows_of(np.full((n, SIZE), value)), np.zeros(SIZE))
    np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-6)
