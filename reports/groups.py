"""How evenly metrics fall out, on the page: over time for the groups that an App measures, and at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anabranch.core.config.goal import MIN
from anabranch.core.model.metrics import by_group
from anabranch.reports.fairness import worst_tenth
from anabranch.reports.intervals import mean
from anabranch.reports.metrics import heading, metric_text, units_of
from anabranch.reports.page import card, table, time_axis
from anabranch.reports.plots import Series, Span, plot
from anabranch.reports.result import Fairness, Result
from anabranch.reports.scales import Axis
from anabranch.reports.text import NOTHING, count_text, number_text, safe

MEAN, WORST = "mean of the groups", "worst tenth of them"


def group_cards(r: Result) -> Iterator[str]:
    """A card for each metric that is measured by group."""
    measured = [(p.time_s, by_group(p.measured)) for p in r.history]
    for name in dict.fromkeys(metric for _, metrics in measured for metric in metrics):
        points = [(at, list(groups[name].values())) for at, groups in measured if name in groups]
        last = [groups[name] for _, groups in measured if name in groups][-1]
        mode = r.goal.way(name)
        lines = [Series(MEAN, [(at, mean(v)) for at, v in points], 0, band=_bands(points))]
        if mode is not None:
            lines.append(Series(WORST, [(at, worst_tenth(v, mode)) for at, v in points], 1))
        y = Axis(name, units_of(name, (v for _, values in points for v in values)), from_zero=False)
        chart = plot(lines, time_axis(r.kind), y, names=True)
        yield card(f"{heading(name)} by group", chart, _caption(name, last, mode))


def _bands(points: Sequence[tuple[float, list[float]]]) -> list[Span]:
    return [Span(at, min(values), max(values)) for at, values in points]


def _caption(name: str, last: dict[str, float], mode: str | None) -> str:
    low, high = (pick(last, key=last.__getitem__) for pick in (min, max))
    first, second = (high, low) if mode == MIN else (low, high)
    words = ("worst", "best") if mode else ("least", "greatest")
    told = zip(words, (first, second), strict=True)
    ends = (f"{word} {group}, {metric_text(name, last[group])}" for word, group in told)
    return f"{len(last)} groups; the band is from the least to the greatest. At the end: {'; '.join(ends)}."


def fairness_card(r: Result) -> list[str]:
    """A table of it, where a run has any."""
    if not r.fairness:
        return []
    head = ("metric", "over", "mean", "worst tenth", "deviation", "Jain's index", "least", "greatest")
    caption = (
        "Over devices: what the last applied update of each said of its own training. Over groups: the last "
        "measurement. The deviation is the standard one; Jain's index is 1 where all are equal."
    )
    return [card("Fairness", table(head, [_row(f) for f in r.fairness]), caption)]


def _row(f: Fairness) -> list[str]:
    def text(value: float | None) -> str:
        return NOTHING if value is None else metric_text(f.metric, value)

    index = NOTHING if f.jain is None else number_text(f.jain, 3)
    figures = (text(f.worst_tenth), text(f.deviation), index, text(f.least), text(f.greatest))
    return [safe(heading(f.metric)), f"{count_text(f.count)} {f.over}", text(f.mean), *figures]
