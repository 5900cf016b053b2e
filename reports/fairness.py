"""How evenly a run's metrics fall out: over its devices, and over the groups that its App measures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from anabranch.core.config.goal import MIN, Goal
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.model.metrics import TRAINED_MAX, by_group
from anabranch.reports.result import DEVICES, GROUPS, ClientShare, Fairness, Over, Point

COMPARED_MIN = 2  # of one alone nothing can be said

Values = Mapping[str, float]  # of each device, or of each group


def worst_tenth(values: Sequence[float], mode: str) -> float:
    """The mean of the worst tenth of the values, of one at least."""
    ranked = sorted(values, reverse=mode == MIN)
    return _moments(ranked[: math.ceil(len(ranked) / 10)])[0]


def jain(values: Sequence[float]) -> float | None:
    """Jain's index, (sum x)^2 / (n sum x^2): 1 where all are equal, 1 / n where one has it all.

    None where a value is negative, or none is over 0: there it says nothing.
    """
    scale = max(values)
    if min(values) < 0 or scale == 0:
        return None
    shares = np.array(values, np.float64) / scale
    return float(shares.sum() ** 2 / (len(shares) * np.square(shares).sum()))


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; finite, whatever finite numbers a device has sent."""
    scale = max(map(abs, values)) or 1.0
    shares = np.array(values, np.float64) / scale
    return float(shares.mean() * scale), float(shares.std() * scale)


def fairness_of(
    goal: Goal, history: Sequence[Point], clients: Mapping[str, ClientShare]
) -> tuple[Fairness, ...]:
    """What `result.json` says of it: each metric over the groups, then over the devices."""
    found = [*_over_groups(history), *_over_devices(clients)]
    return tuple(_evenness(goal, *each) for each in found if len(each[-1]) >= COMPARED_MIN)


def _over_groups(history: Sequence[Point]) -> Iterator[tuple[str, Over, Values]]:
    """Of each metric the last measurement that has it by group."""
    last: dict[str, Values] = {}
    for point in history:
        last |= by_group(point.measured)
    yield from ((name, GROUPS, values) for name, values in last.items())


def _over_devices(clients: Mapping[str, ClientShare]) -> Iterator[tuple[str, Over, Values]]:
    """What each device's last applied update said of its own training: the metrics that most of them have."""
    found: dict[str, dict[str, float]] = {}
    for client, share in clients.items():
        for name, value in share.metrics.items():
            if name != TRAIN_S:  # how long it took is no matter of fairness
                found.setdefault(name, {})[client] = value
    common = sorted(found, key=lambda name: -len(found[name]))[:TRAINED_MAX]  # names come from devices
    yield from ((name, DEVICES, found[name]) for name in common)


def _evenness(goal: Goal, name: str, over: Over, values: Values) -> Fairness:
    known = list(values.values())
    mode = goal.way(name)
    mean, deviation = _moments(known)
    return Fairness(
        metric=name,
        over=over,
        count=len(known),
        mean=mean,
        deviation=deviation,
        least=min(known),
        greatest=max(known),
        worst_tenth=None if mode is None else worst_tenth(known, mode),
        jain=jain(known),
    )
