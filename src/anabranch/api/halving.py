"""Successive halving on paired seeds: which trials go on, and how far. What was measured in, what to run out.

| symbol | name         | meaning                                                           |
|--------|--------------|-------------------------------------------------------------------|
| n      | trials       | trials of the first rung                                          |
| r_k    | shares[k]    | share of a run's budget that trials of rung k are carried to      |
| eta    | HALF         | of the trials of a rung the best 1/eta go on to the next          |

Every trial of a rung is carried to the same share from the same seeds, so that what is compared differs in
the choice alone, and the best ceil(n / eta) of them go on: the same runs, further. What comes later (`add`)
is carried to the last rung at once. Ties go to the trial that came first.

Source: Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization",
AISTATS 2016, for halving by what a part of the budget shows. The shares, eta and the paired seeds are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from anabranch.reports.intervals import mean

HALF = 2
SHARES = (0.25, 0.5, 1.0)


@dataclass(frozen=True, order=True)
class Leg:
    """A trial's run from one seed, as far as a rung."""

    trial: int
    rung: int
    seed: int


@dataclass(frozen=True)
class Merit:
    """What a leg has come to. Of both the greater is the better.

    `value`: the last that was measured; None where nothing was, or nothing finite. `reached`: less whatever
    the target took, None where it was not reached or there is none.
    """

    value: float | None
    reached: float | None = None


Score = tuple[int, float, float]


def score(merits: Sequence[Merit]) -> Score:
    """Of the same trial from several seeds: how often the target was reached, how soon, how good the value.

    The values count where the rest is equal.
    """
    reached = [s.reached for s in merits if s.reached is not None]
    values = [s.value for s in merits if s.value is not None]
    soon = mean(reached) if reached else 0.0
    good = mean(values) if len(values) == len(merits) else -math.inf
    return len(reached), soon, good


@dataclass
class Halving:
    """`trials` to begin with, numbered from 0, and those that were added; `told` is what was measured."""

    trials: int
    seeds: Sequence[int]
    shares: Sequence[float] = SHARES
    added: int = 0
    told: dict[Leg, Merit] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The rung whose share is the whole budget."""
        return len(self.shares) - 1

    def tell(self, leg: Leg, merit: Merit) -> None:
        """What a leg has come to."""
        self.told[leg] = merit

    def add(self) -> int:
        """One trial more; its number."""
        self.added += 1
        return self.trials + self.added - 1

    def due(self) -> list[Leg]:
        """What is to be run before anything can be decided; none at the end. Any order will do."""
        for rung in range(len(self.shares)):
            if missing := self.missing(self.alive(rung), rung):
                return missing
        return self.missing(range(self.trials, self.trials + self.added), self.last)

    def alive(self, rung: int) -> list[int]:
        """The trials that come as far as this rung, the best first; the rung before must be done."""
        if rung == 0:
            return list(range(self.trials))
        before = self._by_score(self.alive(rung - 1), rung - 1)
        return before[: math.ceil(len(before) / HALF)]

    def score(self, trial: int, rung: int) -> Score:
        """What a trial has come to on a rung. Raises `KeyError` where a seed of it is missing."""
        return score([self.told[Leg(trial, rung, seed)] for seed in self.seeds])

    def ranked(self) -> list[int]:
        """All trials, the best first, once nothing is due; who was carried further goes before."""
        whole = [*self.alive(self.last), *range(self.trials, self.trials + self.added)]
        found = self._by_score(whole, self.last)
        for rung in reversed(range(self.last)):
            found += [trial for trial in self._by_score(self.alive(rung), rung) if trial not in found]
        return found

    def best(self) -> int:
        """The first of them."""
        return self.ranked()[0]

    def missing(self, trials: Sequence[int], rung: int) -> list[Leg]:
        """The legs of these on a rung of which nothing is known."""
        legs = [Leg(trial, rung, seed) for trial in trials for seed in self.seeds]
        return [leg for leg in legs if leg not in self.told]

    def _by_score(self, trials: Sequence[int], rung: int) -> list[int]:
        return sorted(trials, key=lambda trial: (self.score(trial, rung), -trial), reverse=True)
