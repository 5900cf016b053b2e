"""Which runs a row still needs: a machine without a clock, so that a tuning goes on where it was broken off.

1. Every point of the grid for `SHORT` of the time, on the tuning seeds.
2. The best `KEPT` of them to the end.
3. As long as the best has a neighbour along an axis that was not run to the end, that neighbour: first one
   beyond what was tried at all, so that no grid is chosen at its edge; `MORE` of them at most.
4. The best on fresh seeds.

Every row has the same budget: 12 points of 1, `KEPT` of 2, at most `MORE` of 3.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SHORT, KEPT, MORE = 0.25, 3, 4
TUNING_SEEDS, SEEDS = (101, 102), (1, 2, 3, 4, 5)
VALIDATION, TEST = "validation", "test"

Setting = tuple[float, ...]  # a value on each axis


@dataclass(frozen=True)
class Axis:
    """A setting (`table.key`) and the values that it begins with, in even ratios; `whole`: integers."""

    setting: str
    values: tuple[float, ...]
    least: float = 0.0
    most: float = math.inf
    whole: bool = False

    def beside(self, value: float) -> list[float]:
        """The values below and above on the grid, which goes on beyond its ends; within the bounds."""
        ratio = (self.values[-1] / self.values[0]) ** (1 / (len(self.values) - 1))
        known = sorted(self.values)
        near = [next((v for v in reversed(known) if v < value), value / ratio)]
        near.append(next((v for v in known if v > value), value * ratio))
        rounded = [float(round(v)) if self.whole else float(f"{v:.3g}") for v in near]
        return [v for v in rounded if self.least <= v <= self.most and v > 0 and v != value]


@dataclass(frozen=True)
class Grid:
    """The points of a row: every combination of its axes' values."""

    axes: tuple[Axis, ...]

    @property
    def points(self) -> list[Setting]:
        """Those that it begins with."""
        return list(itertools.product(*(axis.values for axis in self.axes)))

    def neighbours(self, setting: Setting) -> Iterator[Setting]:
        """One step along one axis."""
        for i, axis in enumerate(self.axes):
            for value in axis.beside(setting[i]):
                yield (*setting[:i], value, *setting[i + 1 :])


class Run(NamedTuple):
    """What is to be run: a point, for how much of the time, from which seed, measured on which part."""

    setting: Setting
    share: float
    seed: int
    part: str


Score = Callable[[Run], float | None]  # accuracy, in %; None of what was not run


@dataclass(frozen=True)
class Progress:
    """What a row knows of itself: what it still needs, in order, and the best point so far, if there is one.

    `settled`: no neighbour of the best is better, or all of them were run. Only where nothing is wanted.
    """

    wanted: Sequence[Run]
    best: Setting | None
    settled: bool = False


def progress(grid: Grid, score: Score) -> Progress:
    """What comes next of a row, of all that was run."""
    if missing := _missing(_tuning(grid.points, SHORT), score):
        return Progress(missing, None)
    ranked = sorted(grid.points, key=lambda point: -mean(point, SHORT, score))
    ended = ranked[:KEPT]
    if missing := _missing(_tuning(ended, 1.0), score):
        return Progress(missing, None)
    while True:
        best = max(ended, key=lambda point: mean(point, 1.0, score))
        near = [point for point in grid.neighbours(best) if point not in ended]
        if not near or len(ended) == KEPT + MORE:
            return Progress(fresh(best, score), best, not near)
        beyond = [point for point in near if point not in grid.points]
        ended.append((beyond or near)[0])
        if missing := _missing(_tuning(ended[-1:], 1.0), score):
            return Progress(missing, best)


def fresh(best: Setting, score: Score) -> list[Run]:
    """What a point still needs on the seeds that took no part in its tuning."""
    return _missing([Run(best, 1.0, seed, TEST) for seed in SEEDS], score)


def _tuning(points: Sequence[Setting], share: float) -> list[Run]:
    return [Run(point, share, seed, VALIDATION) for point in points for seed in TUNING_SEEDS]


def _missing(runs: Sequence[Run], score: Score) -> list[Run]:
    return [run for run in runs if score(run) is None]


def mean(point: Setting, share: float, score: Score) -> float:
    """What a point came to on the tuning's seeds, on the validation part, in so much of the time."""
    return statistics.fmean(score(run) or 0.0 for run in _tuning([point], share))
