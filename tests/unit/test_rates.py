"""Leaky buckets, by arithmetic."""

from __future__ import annotations

import pytest

from anabranch.core.engine.rates import KEPT, Rates


def test_as_many_at_once_as_fit_and_then_one_each_time_there_is_room() -> None:
    rates = Rates(per_minute=6.0, at_once=2.0)
    assert [rates.take("a", 0.0) for _ in range(3)] == [0.0, 0.0, 10.0]
    assert rates.take("a", 4.0) == pytest.approx(6.0), "who is told to wait has not done it"
    assert rates.take("a", 10.0) == 0.0
    assert rates.take("a", 10.0) == 10.0
    assert [rates.take("a", 25.0), rates.take("a", 25.0)] == [0.0, 5.0]


def test_a_bucket_is_never_emptier_than_empty() -> None:
    rates = Rates(per_minute=60.0, at_once=1.0)
    rates.add("a", 0.0)
    assert [rates.take("a", 1000.0), rates.take("a", 1000.0)] == [0.0, 1.0]


def test_time_that_goes_back_lets_nothing_out_and_nothing_in() -> None:
    rates = Rates(per_minute=60.0, at_once=1.0)
    rates.add("a", 100.0)
    assert rates.wait_s("a", 90.0) == 1.0


def test_asking_how_long_to_wait_changes_nothing() -> None:
    rates = Rates(per_minute=60.0, at_once=1.0)
    assert [rates.wait_s("a", 0.0) for _ in range(3)] == [0.0] * 3
    assert len(rates) == 0


def test_each_has_a_bucket_of_its_own_and_those_who_came_last_are_kept() -> None:
    rates = Rates(per_minute=60.0, at_once=1.0, kept=2)
    for who in ("a", "b", "a", "c"):  # b came before a
        rates.add(who, 0.0)
    assert len(rates) == 2
    assert [rates.wait_s(who, 0.0) for who in "abc"] == [2.0, 0.0, 1.0]


@pytest.mark.parametrize("count", [KEPT, KEPT + 1])
def test_there_are_never_more_than_that(count: int) -> None:
    rates = Rates(per_minute=1.0, at_once=1.0)
    for n in range(count):
        rates.add(str(n), 0.0)
    assert len(rates) == KEPT == 4096
