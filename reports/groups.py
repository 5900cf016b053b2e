"""How evenly a metric falls out over the groups that an App measures: their mean, and the worst tenth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from anabranch.core.config.goal import MAX, MIN, WAYS
from anabranch.core.model.metrics import by_group
from anabranch.reports.metrics import heading, metric_text, units_of
from anabranch.reports.page import card, time_axis
from anabranch.reports.plots import Series, Span, plot
from anabranch.reports.result import Result
from anabranch.reports.scales import Axis

MEAN, WORST = "mean of the groups", "worst tenth of them"


def worst_tenth(values: Sequence[float], mode: str) -> float:
    """The mean of the worst tenth of the values, of one at least."""
    ranked = sorted(values, reverse=mode == MIN)
    return statistics.fmean(ranked[: math.ceil(len(ranked) / 10)])


def group_cards(r: Result) -> Iterator[str]:
    """A card for each metric that is measured by group."""
    measured = [(p.time_s, by_group(p.measured)) for p in r.history]
    for name in dict.fromkeys(metric for _, metrics in measured for metric in metrics):
        points = [(at, list(groups[name].values())) for at, groups in measured if name in groups]
        last = [groups[name] for _, groups in measured if name in groups][-1]
        mode = r.goal.mode if name == r.goal.metric else WAYS.get(name, "")
        lines = [Series(MEAN, [(at, statistics.fmean(v)) for at, v in points], 0, band=_bands(points))]
        if mode in (MAX, MIN):
            lines.append(Series(WORST, [(at, worst_tenth(v, mode)) for at, v in points], 1))
        y = Axis(name, units_of(name, (v for _, values in points for v in values)), from_zero=False)
        chart = plot(lines, time_axis(r.kind), y, names=True)
        yield card(f"{heading(name)} by group", chart, _caption(name, last, mode))


def _bands(points: Sequence[tuple[float, list[float]]]) -> list[Span]:
    return [Span(at, min(values), max(values)) for at, values in points]


def _caption(name: str, last: dict[str, float], mode: str) -> str:
    low, high = (pick(last, key=last.__getitem__) for pick in (min, max))
    first, second = (high, low) if mode == MIN else (low, high)
    words = ("worst", "best") if mode else ("least", "greatest")
    told = zip(words, (first, second), strict=True)
    ends = (f"{word} {group}, {metric_text(name, last[group])}" for word, group in told)
    return f"{len(last)} groups; the band is from the least to the greatest. At the end: {'; '.join(ends)}."
