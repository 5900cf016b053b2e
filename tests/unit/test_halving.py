"""Who goes on by successive halving: events in, decisions out, against a plain account of the same rule."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from anabranch.api.halving import Halving, Leg, Merit, score

Objective = Callable[[Leg], Merit]


def carried(halving: Halving, objective: Objective, shuffled: random.Random | None = None) -> list[Leg]:
    """Run what is due until nothing is, and say what was run, in order."""
    ran: list[Leg] = []
    while due := halving.due():
        if shuffled is not None:
            shuffled.shuffle(due)
        for leg in due[: 1 if shuffled else None]:
            halving.tell(leg, objective(leg))
            ran.append(leg)
    return ran


def peak(best: int) -> Objective:
    """The nearer to the best a trial is, the better; on the first rung of one seed that is hidden."""
    return lambda leg: Merit(-abs(leg.trial - best) + (5.0 if leg.seed == 1 else -5.0))


def test_the_better_half_goes_on_from_the_same_seeds() -> None:
    halving = Halving(trials=8, seeds=(0, 1))
    ran = carried(halving, peak(5))
    by_rung = [sorted({leg.trial for leg in ran if leg.rung == rung}) for rung in range(3)]
    assert by_rung == [list(range(8)), [3, 4, 5, 6], [4, 5]], "of equal ones the first"
    assert len(ran) == len(set(ran)) == 2 * (8 + 4 + 2), "nothing is run twice"
    assert {leg.seed for leg in ran if leg.rung == 2} == {0, 1}
    assert halving.best() == 5


def test_who_was_carried_further_ranks_before_who_was_not() -> None:
    halving = Halving(trials=8, seeds=(0, 1))
    carried(halving, lambda leg: peak(5)(leg) if leg.rung else peak(3)(leg))
    assert [halving.alive(rung) for rung in range(3)] == [list(range(8)), [3, 2, 4, 1], [4, 3]]
    assert halving.ranked() == [4, 3, 2, 1, 5, 0, 6, 7]


@pytest.mark.parametrize("trials", [2, 3, 5, 16])
def test_so_many_come_to_each_rung(trials: int) -> None:
    halving = Halving(trials, seeds=(3,))
    ran = carried(halving, peak(0))
    counts = [sum(leg.rung == rung for leg in ran) for rung in range(3)]
    assert counts == [trials, math.ceil(trials / 2), math.ceil(math.ceil(trials / 2) / 2)]


def test_nobody_goes_on_before_all_of_a_rung_are_told() -> None:
    halving = Halving(trials=4, seeds=(0, 1))
    first = halving.due()
    for leg in first[:-1]:
        halving.tell(leg, Merit(1.0))
    assert halving.due() == first[-1:]


def test_the_order_in_which_legs_end_decides_nothing() -> None:
    def objective(leg: Leg) -> Merit:
        return Merit(random.Random(f"{leg.trial} {leg.rung} {leg.seed}").random())

    found = []
    for number in range(5):
        halving = Halving(trials=9, seeds=(0, 1, 2))
        carried(halving, objective, random.Random(number))
        found.append((halving.best(), [halving.alive(rung) for rung in range(3)]))
    assert all(one == found[0] for one in found)


def test_who_was_told_before_is_not_due_again() -> None:
    """As after a kill: the same legs, from a record."""
    whole = Halving(trials=6, seeds=(0, 1))
    ran = carried(whole, peak(2))
    for known in range(len(ran) + 1):
        again = Halving(trials=6, seeds=(0, 1))
        for leg in ran[:known]:
            again.tell(leg, whole.told[leg])
        assert sorted(carried(again, peak(2))) == sorted(ran[known:])
        assert again.best() == whole.best()


def test_an_added_trial_has_the_whole_budget_at_once() -> None:
    halving = Halving(trials=4, seeds=(0, 1))
    carried(halving, peak(9))
    assert halving.best() == 3
    assert halving.add() == 4
    assert halving.due() == [Leg(4, 2, 0), Leg(4, 2, 1)]
    carried(halving, peak(9))
    assert halving.best() == 4


def test_of_equal_trials_the_first_is_the_best() -> None:
    halving = Halving(trials=5, seeds=(0,))
    carried(halving, lambda _: Merit(0.5))
    assert halving.alive(1) == [0, 1, 2]
    assert halving.best() == 0


def test_more_seeds_at_the_target_count_before_sooner_and_sooner_before_better() -> None:
    twice = score([Merit(0.8, -90.0), Merit(0.8, -110.0)])
    sooner = score([Merit(0.8, -50.0), Merit(0.8, -60.0)])
    once = score([Merit(0.8, -1.0), Merit(0.79)])
    never = score([Merit(0.799), Merit(0.799)])
    diverged = score([Merit(0.9), Merit(None)])
    assert sooner > twice > once > never > diverged
    assert diverged[2] == -math.inf
