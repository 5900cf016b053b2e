"""What becomes of a message, and for how long it is held up."""

from __future__ import annotations

import math
from typing import Any

import pytest

from anabranch.core.config.faults import (
    FAULTS,
    UNHARMED,
    Fate,
    FaultKind,
    FaultsTable,
    MessageFaults,
    length_s,
)

# Quantiles of a delay of 8 s in the mean, by the distributions' own formulas.
QUANTILES = [
    ("fixed", 0.0, 8.0),
    ("fixed", 0.9, 8.0),
    ("uniform", 0.0, 0.0),
    ("uniform", 0.25, 4.0),
    ("uniform", 0.75, 12.0),
    ("exponential", 0.0, 0.0),
    ("exponential", 0.5, 8 * math.log(2)),
    ("exponential", 0.75, 8 * math.log(4)),
    ("lognormal", 0.5, 8 * math.exp(-0.5)),
    ("lognormal", 0.8413447460685429, 8 * math.exp(0.5)),  # a sigma over the median
    ("pareto", 0.0, 4.0),
    ("pareto", 0.75, 8.0),
    ("pareto", 0.99, 40.0),
]


@pytest.mark.parametrize(("shape", "u", "s"), QUANTILES)
def test_how_long_a_delay_is(shape: str, u: float, s: float) -> None:
    assert length_s(shape, 8.0, u) == pytest.approx(s, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("shape", ["uniform", "exponential", "lognormal", "pareto"])
def test_the_rarest_draws_are_finite(shape: str) -> None:
    for u in (0.0, 1 - 2.0**-53):
        assert 0.0 <= length_s(shape, 1.0, u) < math.inf


def fates(count: int = 1, **table: Any) -> list[Fate]:
    faults = MessageFaults(FaultsTable(**table), seed=3)
    return [faults.fate("a up", number) for number in range(count)]


def test_what_is_certain() -> None:
    assert fates() == [UNHARMED] == [Fate((0.0,), held=False)]
    assert fates(loss=1.0) == [Fate(())]
    assert fates(duplication=1.0) == [Fate((0.0, 0.0))]
    assert fates(reordering=1.0) == [Fate((0.0,), held=True)]
    assert fates(delay=1.0, delay_s=3.0, delay_shape="fixed") == [Fate((3.0,))]
    (late,) = fates(duplication=1.0, delay=1.0, delay_s=3.0, delay_shape="uniform")
    assert len({*late.delays_s}) == 2, "each copy has a delay of its own"


@pytest.mark.parametrize("fault", ["loss", "duplication", "reordering", "delay"])
def test_how_often_it_is(fault: str) -> None:
    harmed = [fate for fate in fates(4000, **{fault: 0.25}) if fate != UNHARMED]
    assert abs(len(harmed) - 1000) < 120


def test_a_message_and_a_link_and_a_seed_have_draws_of_their_own() -> None:
    table = FaultsTable(loss=0.5)
    links = [
        tuple(MessageFaults(table, seed).fate(link, n) == UNHARMED for n in range(64))
        for seed in (1, 2)
        for link in ("a up", "a down")
    ]
    assert len(set(links)) == 4
    assert all(0 < sum(drawn) < 64 for drawn in links)


@pytest.mark.parametrize(
    ("fate", "kinds"),
    [
        (UNHARMED, ()),
        (Fate(()), (FaultKind.LOST,)),
        (Fate((0.0, 0.0)), (FaultKind.DUPLICATED,)),
        (Fate((0.5,)), (FaultKind.DELAYED,)),
        (Fate((0.0, 0.5)), (FaultKind.DUPLICATED, FaultKind.DELAYED)),
        (Fate((0.0,), held=True), (FaultKind.REORDERED,)),
    ],
)
def test_the_faults_in_a_fate(fate: Fate, kinds: tuple[FaultKind, ...]) -> None:
    assert fate.kinds == kinds


def test_whether_anything_goes_wrong() -> None:
    assert not FaultsTable().on
    tables: list[dict[str, Any]] = [{name: 0.5} for name in FAULTS]
    assert all(FaultsTable(**table).on for table in tables)
    assert not FaultsTable(delay_s=9.0, server_down_s=1.0, torn_tail=1.0).on, "how, not how often"


def test_what_takes_back_what_was_acknowledged() -> None:
    assert not FaultsTable(server_crash_every_s=1.0, torn_tail=1.0).takes_back
    assert FaultsTable(restore_every_s=1.0).takes_back is True
    assert FaultsTable(lost_tail=0.5).takes_back is True
