"""What a device holds of a delta log: each coordinate as the newest part that covers it had it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.model.holdings import PARTS_MAX, HeldPart, Holdings, covers, has, joined, since, usable
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import TensorSet, UnitMap, tensor_set, unit_map
from anabranch.testing.models import GROUPS, SPEC, tensors

PLAIN = ParamSpec.of(tensors(), GROUPS)
SIZES = [group.size for group in GROUPS]

Part = UnitMap | TensorSet | None


def units(*kept: range | list[int]) -> UnitMap:
    return unit_map(SPEC, kept)


LOW, HIGH, ALL = units(range(4), [0]), units(range(4, 8), [1, 2]), units(range(8), range(3))


def some_units(size: int) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(0, size - 1), min_size=1).map(sorted)


PARTS: st.SearchStrategy[Part] = st.one_of(
    st.none(),
    st.tuples(*map(some_units, SIZES)).map(lambda kept: unit_map(SPEC, kept)),
    st.sets(st.sampled_from([i for i, t in enumerate(SPEC.tensors) if t.aggregated]), min_size=1).map(
        lambda found: tensor_set(SPEC, sorted(found))
    ),
)


def where(part: Part) -> slice | np.ndarray:
    return slice(None) if part is None else part.indices


def versions_of(holdings: Holdings) -> list[int]:
    """By coordinate the version that is held, -1: none."""
    found = np.full(SPEC.size, -1)
    for held in since(holdings, 0):
        found[where(held.part)] = held.version
    return found.tolist()


@given(st.lists(st.tuples(st.integers(0, 2), PARTS), max_size=PARTS_MAX))
def test_a_coordinate_is_of_the_newest_part_that_covers_it(steps: list[tuple[int, Part]]) -> None:
    holdings: Holdings = None
    version, expected = 0, np.full(SPEC.size, -1)
    for step, part in steps:
        version += step
        holdings = joined(holdings, HeldPart(version, part))
        expected[where(part)] = version
        assert versions_of(holdings) == expected.tolist()
        assert has(holdings, version, part)
        assert not has(holdings, version + 1, part)


@given(PARTS, PARTS)
def test_a_part_covers_another_of_its_kind_that_has_no_coordinate_more(a: Part, b: Part) -> None:
    every = np.arange(SPEC.size)
    if covers(a, b):
        assert set(every[where(b)]) <= set(every[where(a)])
    elif type(a) is type(b):
        assert not set(every[where(b)]) <= set(every[where(a)]) or isinstance(a, UnitMap)


def test_units_cover_by_group() -> None:
    assert covers(ALL, LOW)
    assert covers(units(range(6), [0, 2]), LOW)
    assert not covers(LOW, ALL)
    assert not covers(LOW, units(range(4), [1]))
    assert not covers(LOW, None)
    assert covers(None, LOW)


def test_what_came_before_too_many_is_forgotten() -> None:
    singles = [units([u % 8], [u % 3]) for u in range(PARTS_MAX + 3)]
    holdings: Holdings = 0
    for version, part in enumerate(singles, 1):
        holdings = joined(holdings, HeldPart(version, part), "ab")
    assert isinstance(holdings, tuple)
    assert len(holdings) == PARTS_MAX
    assert holdings[-1] == HeldPart(PARTS_MAX + 3, singles[-1])


def test_a_whole_version_stays_under_the_parts_with_its_name() -> None:
    whole, part = joined(3, HeldPart(5, LOW, "cd"), "ab")
    assert (whole.version, whole.part, whole.head, part.head) == (3, None, "ab", "cd")
    assert joined((whole, part), HeldPart(6, None)) == (HeldPart(6),)


def test_a_version_before_the_newest_is_of_another_history() -> None:
    assert joined(joined(3, HeldPart(5, LOW)), HeldPart(4, HIGH)) == (HeldPart(4, HIGH),)
    assert joined(3, HeldPart(2, HIGH)) == (HeldPart(2, HIGH),)


@pytest.mark.parametrize(
    ("known", "left"), [({3, 5, 6}, 3), ({5, 6}, 2), ({6}, 1), ({3, 6}, 1), ({3, 5}, 0), (set(), 0)]
)
def test_what_can_be_led_from_are_the_newest_that_are_known(known: set[int], left: int) -> None:
    held = HeldPart(3), HeldPart(5, LOW), HeldPart(6, HIGH)
    assert usable(held, known.__contains__) == (held[3 - left :] or None)


def test_a_version_that_is_held_whole_is_usable_or_not() -> None:
    assert usable(3, {3}.__contains__) == 3
    assert usable(3, {4}.__contains__) is None
    assert usable(None, {4}.__contains__) is None
    assert usable((HeldPart(3),), {3}.__contains__) == 3


def test_a_payload_leads_from_the_parts_since_a_version() -> None:
    held = HeldPart(3), HeldPart(5, LOW), HeldPart(5, HIGH), HeldPart(6, LOW)
    assert since(held, 5) == held[1:]
    assert since(held, 7) == since(held, None) == since(None, 2) == ()
    assert since(4, 4) == (HeldPart(4),)
