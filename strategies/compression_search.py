"""The strongest compression that costs at most so much accuracy, found by greedy steps along two lists.

From the mildest pair (p_s, p_q) on, the single step along either list that saves most bytes is taken, as long
as the accuracy stays within theta of the mildest pair's; it ends where no step does. That a search
over candidate lists is made, and that a threshold on the accuracy ends it, is recalled from
arXiv 2312.15186; the order of the steps is this project's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anabranch.strategies.compression_schedule import BITS, KEPT, Strength


@dataclass(frozen=True)
class Trial:
    """What one pair came to: accuracy (a fraction) on held-out data, and bytes of a mean update."""

    strength: Strength
    accuracy: float
    update_bytes: float


@dataclass(frozen=True)
class Decision:
    """One look at a pair: whether it was taken, and why."""

    trial: Trial
    taken: bool
    why: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        trial = self.trial
        return {
            **asdict(trial.strength),
            "accuracy": trial.accuracy,
            "update_bytes": trial.update_bytes,
            "taken": self.taken,
            "why": self.why,
        }


@dataclass(frozen=True)
class Search:
    """The pair that was found, and every decision on the way."""

    found: Strength
    decisions: tuple[Decision, ...]


def search_compression(
    measure: Callable[[Strength], Trial],
    loss_max: float,
    kept: Sequence[float] = KEPT,
    bits: Sequence[int] = BITS,
) -> Search:
    """Search the lists, both from mild to strong. `measure` is called once for each pair that is looked at.

    `loss_max`: theta, a fraction.
    """
    at, decisions = (0, 0), []
    reference = measure(Strength(kept[0], bits[0]))
    decisions.append(Decision(reference, True, "the mildest pair"))
    tried: dict[Strength, Trial] = {reference.strength: reference}
    while True:
        steps = [(at[0] + 1, at[1]), (at[0], at[1] + 1)]
        pairs = {s: Strength(kept[s[0]], bits[s[1]]) for s in steps if s[0] < len(kept) and s[1] < len(bits)}
        for pair in pairs.values():
            if pair not in tried:
                tried[pair] = measure(pair)
        good = {s: p for s, p in pairs.items() if reference.accuracy - tried[p].accuracy <= loss_max}
        chosen = min(good, key=lambda s: tried[good[s]].update_bytes, default=None)
        for step, pair in pairs.items():
            why = _why(step == chosen, reference, tried[pair], loss_max)
            decisions.append(Decision(tried[pair], step == chosen, why))
        if chosen is None:
            return Search(Strength(kept[at[0]], bits[at[1]]), tuple(decisions))
        at = chosen


def _why(taken: bool, reference: Trial, trial: Trial, loss_max: float) -> str:
    loss = 100 * (reference.accuracy - trial.accuracy)
    if loss > 100 * loss_max:
        return f"loses {loss:.2f} points, more than {100 * loss_max:g}"
    change = f"loses {loss:.2f}" if loss > 0 else f"gains {-loss:.2f}"
    return f"{change} points" + (", saves most" if taken else ", saves less")
