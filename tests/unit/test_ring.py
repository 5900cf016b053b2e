"""Masked sums: the golden values, the algebra for any sums, how far values go, what is out of range."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.errors import ConfigError, InvalidUpdate
from anabranch.core.privacy.normals import normals
from anabranch.core.secagg.cohort import Cohort, CohortMember
from anabranch.core.secagg.ring import Ring, add_mask, add_weighted, mask_of, whole_weight
from anabranch.core.secagg.sums import mask_sum
from anabranch.core.secagg.terms import Terms, weights_of

KEYS = bytes(range(32)), bytes(range(32, 64))
GOLDEN = Ring(bits=32, value_bits=8, clip=1.0, size=4)
HALF = np.full(4, 0.5)
TERMS = Terms(32, 20, 1.0, 1000, (16, 11, 9), 200, 8, ("ab" * 32,))


def test_the_golden_values() -> None:
    first = GOLDEN.quantise(np.array([0.5, -0.25, 0.1, 2.0]), HALF)
    second = GOLDEN.quantise(np.array([-0.5, 0.125, 0.3, -0.01]), HALF)
    assert first.tolist() == [64, -32, 13, 127]
    assert second.tolist() == [-63, 16, 38, -1]
    assert mask_of(KEYS[0], 4, 32).tolist() == [0x7D2BFD39, 0x6A19C5D9, 0x7703BD8D, 0x494ADCB8]
    y = GOLDEN.masked(first, KEYS[:1]), GOLDEN.masked(second, KEYS[1:])
    assert y[0].tolist() == [2100034937, 1780073913, 1996733850, 1229643063]
    total, masks = GOLDEN.empty(), GOLDEN.empty()
    for numbers, key, weight in zip(y, KEYS, (16, 9), strict=True):
        add_weighted(total, numbers, weight)
        add_mask(masks, key, weight)
    assert total.tolist() == [4097853325, 897541911, 574900104, 3369214411]
    assert masks.tolist() == [4097852868, 897542279, 574899554, 3369212388]
    assert GOLDEN.unmasked(total, [masks]).tolist() == [457, -368, 550, 2023]


@pytest.mark.parametrize("value_bits", [8, 9, 12, 20])
@pytest.mark.parametrize("size", [1, 10, 1000])
@pytest.mark.parametrize("draw", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_no_integer_is_beyond_the_largest(value_bits: int, size: int, draw: float) -> None:
    """Whatever the clip: as floats the reach times the scale may be a little more than `top`."""
    for clip in [0.1, 0.3, 0.7, 1.0, 3.0, *np.random.default_rng(1).uniform(0.01, 10, 200)]:
        ring = Ring(32, value_bits, float(clip), size)
        for value in (-ring.reach, ring.reach, -2 * ring.reach, 2 * ring.reach):
            found = ring.quantise(np.full(size, value), np.full(size, draw))
            assert abs(int(found[0])) <= ring.top


def test_a_mask_of_16_bits_is_the_same_stream_and_blocks_do_not_show() -> None:
    words = mask_of(KEYS[0], 70_000, 32)
    assert mask_of(KEYS[0], 140_000, 16).tobytes() == words.tobytes()
    assert mask_of(KEYS[0], 4, 32).tolist() == words[:4].tolist()


CASES = st.tuples(
    st.sampled_from([(32, 20), (32, 8), (16, 9), (16, 4)]),
    st.integers(1, 5),  # values
    st.integers(1, 3),  # keepers
    st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=16),
    st.integers(0, 2**32 - 1),
)


@settings(max_examples=1000)
@given(CASES)
def test_the_sum_is_exact_whatever_the_weights_the_order_and_who_drops_out(case: Any) -> None:
    check_sum(case)


@pytest.mark.prove
@settings(max_examples=10_000)
@given(CASES)
def test_ten_thousand_sums_are_exact(case: Any) -> None:
    check_sum(case)


def check_sum(case: Any) -> None:
    (bits, value_bits), size, keepers, updates, seed = case
    ring = Ring(bits, value_bits, 1.0, size)
    rng = np.random.default_rng(seed)
    total, expected = ring.empty(), np.zeros(size, np.int64)
    masks = [ring.empty() for _ in range(keepers)]
    for at in rng.permutation(len(updates)):
        weight, stays = updates[at]
        integers = rng.integers(-ring.top, ring.top + 1, size)
        seeds = [rng.bytes(32) for _ in range(keepers)]
        numbers = ring.masked(integers, seeds)
        if not stays:
            continue
        add_weighted(total, numbers, weight)
        expected += weight * integers
        for found, one in zip(masks, seeds, strict=True):
            add_mask(found, one, weight)
    assert ring.unmasked(total, masks).tolist() == expected.tolist()


def test_values_are_cut_to_the_length_and_the_reach_and_rounded_without_bias() -> None:
    ring = Ring(32, 20, 2.0, 10_000)
    assert ring.reach == pytest.approx(0.32)
    rng = np.random.default_rng(1)
    long = ring.clipped(rng.normal(size=10_000))
    assert np.linalg.norm(long) == pytest.approx(2.0)
    short = np.full(10_000, 1e-3)
    assert ring.clipped(short) is short
    drawn = Ring(32, 8, 2.0, 10_000)
    value = 0.3 / drawn.scale
    assert drawn.quantise(np.full(10_000, value), rng.random(10_000)).mean() == pytest.approx(0.3, abs=0.02)
    with pytest.raises(InvalidUpdate, match="diverged"):
        ring.clipped(np.full(10_000, np.nan))


def test_nothing_is_beyond_the_top_even_where_the_sum_of_floats_rounds_up() -> None:
    ring = Ring(32, 20, 1.0, 2)
    ends = ring.quantise(np.array([9.0, -9.0]), np.full(2, np.nextafter(1.0, 0.0)))
    assert ends.tolist() == [ring.top, 1 - ring.top]
    assert ring.quantise(np.array([-9.0, -9.0]), np.zeros(2)).tolist() == [-ring.top] * 2


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.floats(0.01, 10.0))
def test_no_honest_update_is_longer_than_is_said(seed: int, size: int, clip: float) -> None:
    ring = Ring(16, 9, clip, size)
    rng = np.random.default_rng(seed)
    values = ring.clipped(rng.normal(size=size) * rng.exponential(10.0))
    assert np.linalg.norm(ring.quantise(values, rng.random(size))) <= ring.length


def test_weights_of_a_polynomial() -> None:
    weights = weights_of(lambda tau: (1 + tau) ** -0.5, 16, steepest=0)
    assert weights[:12] == (16, 11, 9, 8, 7, 7, 6, 6, 5, 5, 5, 5)
    assert weights[-1] == 1
    assert weights[-2] == 2
    terms = replace(TERMS, weights=weights)
    assert [terms.weight(tau) for tau in (0, 254, 255, 10**6)] == [16, 1, 1, 1]
    assert whole_weight(16, 0.0) == 1
    assert weights_of(lambda tau: 1.0, 16) == (16,)


@pytest.mark.parametrize(
    ("levels", "power", "weights"),
    [
        (16, 0.5, (16, 11, 9, 8, 7, 7, 6, 6, 5, 5, 5, 5, 4)),
        (65536, 16.0, (65536, 16384)),  # of 1 / 65536 and less, a quarter
        (7, 9.0, (7, 2)),  # a quarter of 7 is between 1 and 2: 1 would be 7 times less
        (2, 1.0, (2, 1)),
        (1, 1.0, (1,)),
    ],
)
def test_no_weight_is_under_a_quarter_of_the_largest(
    levels: int, power: float, weights: tuple[int, ...]
) -> None:
    assert weights_of(lambda tau: (1 + tau) ** -power, levels) == weights
    replace(TERMS, weights=weights, value_bits=4, plan="0c" * 32).check()


def test_terms_with_steeper_weights_are_an_older_releases() -> None:
    for weights in ((5, 1), (16, 8, 3), (3, 16)):
        replace(TERMS, weights=weights).check()
        with pytest.raises(ConfigError, match=rf"go from {min(weights)} to {max(weights)}: .* 4 times"):
            replace(TERMS, weights=weights, plan="0c" * 32).check()


@pytest.mark.parametrize(("bits", "value_bits", "weight", "cohort"), [(32, 20, 16, 256), (16, 9, 8, 16)])
def test_the_largest_values_stay_in_range_and_one_bit_more_is_refused(
    bits: int, value_bits: int, weight: int, cohort: int
) -> None:
    terms = replace(TERMS, bits=bits, value_bits=value_bits, weights=(weight,), cohort=cohort)
    terms.check()
    ring = replace(terms.ring, size=2)
    total = ring.empty()
    for _ in range(cohort):
        add_weighted(total, ring.numbers(np.array([ring.top, -ring.top])), weight)
    most = terms.values_max(weight * cohort)
    assert ring.unmasked(total, []).tolist() == [most, -most]
    with pytest.raises(ConfigError, match=rf"need {bits + 1} bits, and secagg.bits is {bits}"):
        replace(terms, value_bits=value_bits + 1).check()
    with pytest.raises(ConfigError, match="need"):
        replace(terms, cohort=cohort + 1).check()
    with pytest.raises(ConfigError, match="need"):
        replace(terms, weights=(weight + 1,)).check()


ROOM = st.tuples(
    st.sampled_from([32, 16]),
    st.integers(2, 16),  # bits of a value
    st.lists(st.integers(1, 40), min_size=1, max_size=4),  # weights
    st.integers(2, 60),  # updates in a sum
)


@settings(max_examples=300)
@given(ROOM, st.integers(0, 2**32 - 1))
def test_what_the_configuration_lets_through_never_overflows(
    room: tuple[int, int, list[int], int], seed: int
) -> None:
    """Against whole numbers that have no end: all at the ends of their range, or anywhere between."""
    bits, value_bits, weights, cohort = room
    terms = Terms(bits, value_bits, 1.0, 4, tuple(weights), cohort, 2, ("ab" * 32,))
    needed = value_bits + math.ceil(math.log2(max(weights))) + math.ceil(math.log2(cohort))
    if needed > bits:
        with pytest.raises(ConfigError, match=f"need {needed} bits"):
            terms.check()
        return
    terms.check()
    ring, rng = terms.ring, np.random.default_rng(seed)
    total, exact = ring.empty(), [0] * 4
    for _ in range(cohort):
        weight = int(rng.choice(weights))
        integers = np.array([ring.top, -ring.top, *rng.integers(-ring.top, ring.top + 1, 2)])
        add_weighted(total, ring.masked(integers, [KEYS[0]]), weight)
        add_mask(total, KEYS[0], -weight % 2**bits)
        exact = [whole + weight * int(q) for whole, q in zip(exact, integers, strict=True)]
    assert ring.unmasked(total, []).tolist() == exact


def test_noise_needs_room_too() -> None:
    private = replace(TERMS, size=10**6, noise=1.0, participations=4, separation=2)
    with pytest.raises(ConfigError, match="noise of deviation"):
        private.check()
    replace(private, value_bits=13).check()
    assert private.values_max(1) > 9 * private.deviation > private.ring.top


def test_a_keepers_sum_is_its_masks_and_the_noise_of_its_key() -> None:
    """By hand: weighed masks, and normals of z max(W) (s C + sqrt(d)), to whole numbers."""
    terms = replace(TERMS, value_bits=13, noise=1.5, participations=4, separation=2)
    ring = terms.ring
    deviation = 1.5 * 16 * (((1 << 12) - 1) / min(1.0, 16 / 1000**0.5) + 1000**0.5)
    masks = [
        mask_of(key, 1000, 32).astype(object) * weight for key, weight in zip(KEYS, (16, 9), strict=True)
    ]
    noise = [int(value) for value in np.rint(normals(KEYS[0], 1000) * deviation)]
    exact = [int(a + b + n) % 2**32 for a, b, n in zip(*masks, noise, strict=True)]
    assert mask_sum(terms, zip(KEYS, (16, 9), strict=True), KEYS[0]).tolist() == exact
    quiet = replace(terms, noise=0.0, participations=0)
    assert ring.unmasked(mask_sum(terms, [], KEYS[1]), [mask_sum(quiet, [], KEYS[1])]).any()


def test_how_far_honest_sums_go() -> None:
    """Nine deviations of the noise of all keepers beyond the largest values."""
    two = replace(TERMS, value_bits=13, noise=1.5, participations=4, keepers=("ab" * 32, "cd" * 32))
    spread = 2**0.5 * two.deviation
    assert two.values_max(40) == 40 * two.ring.top + math.ceil(9 * spread)
    assert two.length_max(40) == pytest.approx(40 * two.ring.length + spread * (1000**0.5 + 9), rel=1e-12)


def test_as_many_weights_as_may_be() -> None:
    replace(TERMS, weights=(16,) + (1,) * 1023).check()
    with pytest.raises(ConfigError, match="1024 of them at most"):
        replace(TERMS, weights=(16,) + (1,) * 1024).check()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"bits": 24}, "secagg.bits"),
        ({"value_bits": 1}, "secagg.value_bits"),
        ({"value_bits": 33}, "secagg.value_bits"),
        ({"clip": 0.0}, "secagg.clip"),
        ({"clip": float("inf")}, "secagg.clip"),
        ({"size": 0}, "trained values"),
        ({"cohort": 7}, "cohort_min"),
        ({"cohort_min": 1}, "cohort_min"),
        ({"weights": (16, 0)}, "from 1"),
        ({"weights": ()}, "from 1"),
        ({"keepers": ()}, "secagg.keepers"),
        ({"keepers": ("b", "a")}, "secagg.keepers"),
        ({"noise": 1.0}, "participations"),
        ({"noise": math.inf, "participations": 1}, "participations"),
        ({"participations": 1}, "noise"),
    ],
)
def test_terms_that_promise_nothing_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        replace(TERMS, **change).check()


@pytest.mark.parametrize(
    "said",
    [
        {"size": 10**400},
        {"weights": [10**400]},
        {"noise": 1e308, "participations": 1},
        {"clip": 5e-324},
        {"cohort": 1e999},
    ],
)
def test_numbers_of_any_size_in_what_somebody_says_are_no_terms(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the terms of masked sums cannot be read"):
        Terms.from_json({**TERMS.to_json(), **said})


def test_terms_travel_as_json_and_each_of_them_is_in_the_digest() -> None:
    assert Terms.from_json(TERMS.to_json()) == TERMS
    with pytest.raises(ConfigError, match="cannot be read"):
        Terms.from_json({**TERMS.to_json(), "size": None})
    changed: dict[str, Any] = {"bits": 16, "value_bits": 9, "clip": 2.0, "size": 9, "weights": (1,)}
    changed |= {
        "cohort": 9,
        "cohort_min": 9,
        "keepers": (),
        "noise": 1.0,
        "participations": 1,
        "separation": 1,
    }
    others = [replace(TERMS, **{name: value}).digest for name, value in changed.items()]
    assert set(changed) == set(TERMS.to_json())
    assert len({TERMS.digest, *others}) == len(others) + 1


def test_every_word_of_a_cohort_is_in_its_digest() -> None:
    member = CohortMember(b"s", b"g", b"c", "ab", 3, 2)
    cohort = Cohort("run", 1, 4, TERMS, (member, member))
    others = [
        replace(cohort, **change)
        for change in (
            {"run_id": "runs"},
            {"number": 2},
            {"version": 5},
            {"terms": replace(TERMS, noise=1.0)},
            {"members": (member,)},
        )
    ]
    changes: tuple[dict[str, Any], ...] = (
        {"signed": b""},
        {"signature": b""},
        {"certificate": b""},
        {"base_head": ""},
        {"arrived_version": 4},
        {"weight": 3},
        {"signed": b"sg", "signature": b""},
    )
    others += [replace(cohort, members=(replace(member, **change), member)) for change in changes]
    assert len({found.digest for found in [cohort, *others]}) == len(others) + 1
