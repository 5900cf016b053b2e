"""How long a device's local step takes by the part of the model that it trains.

| symbol | name     | meaning                                                                        |
|--------|----------|--------------------------------------------------------------------------------|
| x      | share    | of the model's parameters that are in the task, 0 to 1                         |
| t      |          | seconds of a step, the mean of a task's                                        |
| a + b x|          | what t is taken to be: a whatever the part, such as reading a batch            |
| f      | fixed    | a / (a + b)                                                                    |
| s      | whole_s  | a + b, a step of the whole model                                               |

Of a device the last three steps of each share are known, of the six shares that it had last (`seen`).

    f   from the medians of three steps each at the least and the largest share, these a quarter apart at
        least; 0 where the line says less, 1 where it says more
    s   the median of t / (f + (1 - f) x) over the newest three steps, the lower one of two

So one task that was slow for another reason, such as a device's first, changes neither. f of a device that
has had one share only cannot be known: x and t alone do not tell a from b. It is taken to be the median f of
the fleet, as a comes of the model and its framework as much as of the device. Where nobody's is known it is
0, the value that corrects itself: with it a slow device gets a smaller part, and by that shows what its f is;
with 1 it would train the whole model for ever, and nobody would find out. s does not depend on it while the
device trains whole models. All of this is ours.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import median, median_low

KEPT = 3  # steps of a share
SHARES_MAX = 6
APART = 0.25  # the least distance of two shares whose times tell a from b

Seen = tuple[tuple[float, float], ...]  # (x, t), oldest first


@dataclass(frozen=True)
class StepTime:
    """A device's a and b, in steps of the whole model on a fast device: the first quartile of the fleet's."""

    a: float
    b: float

    def at(self, share: float) -> float:
        """How long a step of so much of the model takes: 1 as long as a fast device's of the whole one."""
        return self.a + self.b * share


def observed(seen: Seen, share: float, step_s: float) -> Seen:
    """What is known after one more task."""
    same = [one for one in seen if one[0] == share]
    kept = [one for one in seen if len(same) < KEPT or one is not same[0]]
    kept.append((share, step_s))
    lately = list(dict.fromkeys(x for x, _ in reversed(kept)))[:SHARES_MAX]
    return tuple(one for one in kept if one[0] in lately)


def fixed_of(seen: Seen) -> float | None:
    """The device's own f, to two digits; None where its tasks do not tell."""
    at: dict[float, list[float]] = {}
    for share, step_s in seen:
        at.setdefault(share, []).append(step_s)
    times = {share: median(steps) for share, steps in at.items() if len(steps) == KEPT}
    if not times or max(times) - min(times) < APART:
        return None
    least, most = min(times), max(times)
    b = (times[most] - times[least]) / (most - least)
    a = times[most] - b * most
    return 1.0 if b <= 0 else round(max(a, 0.0) / (max(a, 0.0) + b), 2)


def whole_of(seen: Seen, fixed: float) -> float:
    """The device's s, in seconds; it has been seen once at least."""
    return median_low([step_s / (fixed + (1 - fixed) * share) for share, step_s in seen[-KEPT:]])


def quantile(counts: Counter[float], q: float) -> float | None:
    """The least value that a fraction q of all are not above; None where there are none."""
    left = math.ceil(q * counts.total())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return None
