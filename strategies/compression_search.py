"""The strongest compression that costs at most so much of a metric, found by greedy steps along two lists.

From the mildest pair (p_s, p_q) on, the single step along either list that saves most bytes is taken, as long
as the metric stays within theta of the mildest pair's; it ends where no step does. That a search over
candidate lists is made, and that a threshold on the accuracy ends it, is recalled from arXiv 2312.15186; the
order of the steps is this project's, and so is another metric in the place of the accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anabranch.core.config.goal import Goal
from anabranch.core.model.metrics import ACCURACY
from anabranch.strategies.compression_schedule import BITS, KEPT, Strength


@dataclass(frozen=True)
class Trial:
    """What one pair came to: the metric on held-out data, None if not finite, and bytes of a mean update."""

    strength: Strength
    value: float | None
    update_bytes: float


@dataclass(frozen=True)
class SearchStep:
    """One look at a pair: whether it was taken, and why."""

    trial: Trial
    taken: bool
    why: str

    def to_json(self, metric: str = ACCURACY) -> dict[str, Any]:
        """Plain values; the value by the metric's name."""
        trial = self.trial
        return {
            **asdict(trial.strength),
            metric: trial.value,
            "update_bytes": trial.update_bytes,
            "taken": self.taken,
            "why": self.why,
        }


@dataclass(frozen=True)
class Search:
    """The pair that was found, and every decision on the way."""

    found: Strength
    decisions: tuple[SearchStep, ...]


def search_compression(
    measure: Callable[[Strength], Trial],
    loss_max: float,
    goal: Goal,
    kept: Sequence[float] = KEPT,
    bits: Sequence[int] = BITS,
) -> Search:
    """Search the lists, both from mild to strong. `measure` is called once for each pair that is looked at.

    `loss_max`: theta, how much worse the value may be, by the metric of `goal` and in its unit.
    """
    at, decisions = (0, 0), []
    reference = measure(Strength(kept[0], bits[0]))
    decisions.append(SearchStep(reference, True, "the mildest pair"))
    tried: dict[Strength, Trial] = {reference.strength: reference}
    while True:
        steps = [(at[0] + 1, at[1]), (at[0], at[1] + 1)]
        pairs = {s: Strength(kept[s[0]], bits[s[1]]) for s in steps if s[0] < len(kept) and s[1] < len(bits)}
        for pair in pairs.values():
            if pair not in tried:
                tried[pair] = measure(pair)
        good = {s: p for s, p in pairs.items() if lost(goal, reference, tried[p]) <= loss_max}
        chosen = min(good, key=lambda s: tried[good[s]].update_bytes, default=None)
        for step, pair in pairs.items():
            why = _why(step == chosen, lost(goal, reference, tried[pair]), loss_max, goal)
            decisions.append(SearchStep(tried[pair], step == chosen, why))
        if chosen is None:
            return Search(Strength(kept[at[0]], bits[at[1]]), tuple(decisions))
        at = chosen


def lost(goal: Goal, reference: Trial, trial: Trial) -> float:
    """How much worse than the mildest pair; infinite where a value is not finite."""
    if reference.value is None or trial.value is None:
        return math.inf
    return goal.signed(reference.value) - goal.signed(trial.value)


def _why(taken: bool, loss: float, loss_max: float, goal: Goal) -> str:
    def amount(value: float) -> str:
        return f"{100 * value:.2f} points" if goal.metric == ACCURACY else f"{value:.4g}"

    if loss == math.inf:
        return "is not finite"
    if loss > loss_max:
        most = f"{100 * loss_max:g}" if goal.metric == ACCURACY else f"{loss_max:g}"
        return f"loses {amount(loss)}, more than {most}"
    change = f"{'loses' if loss > 0 else 'gains'} {amount(abs(loss))}"  # of 0 no -0.00
    return change + (", saves most" if taken else ", saves less")
