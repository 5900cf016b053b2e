"""The page of several runs: their curves over each other and a table with the spreads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from anabranch.core.errors import DataError
from anabranch.core.model.metrics import ACCURACY
from anabranch.reports.against import AT, TITLES, Against, axis, ways
from anabranch.reports.equal import equally_far
from anabranch.reports.metrics import axis_of, heading, lacking, metric_names, units_of, value
from anabranch.reports.page import (
    card,
    document,
    empty,
    flaws_text,
    fold,
    grid,
    header,
    legend_list,
    settings_table,
    standalone,
    table,
)
from anabranch.reports.pairs import paired, paired_lines
from anabranch.reports.plots import Series, Span, line_chart, plot
from anabranch.reports.result import Kind, Result
from anabranch.reports.scales import FARTHEST
from anabranch.reports.settings import PLACES, SEED, changed
from anabranch.reports.spreads import RunGroup, Spread, SpreadRow, compare, grouped
from anabranch.reports.svg import COLOURS
from anabranch.reports.text import (
    BYTES,
    COUNT,
    NOTHING,
    SECONDS,
    Unit,
    count_text,
    counted,
    number_text,
    safe,
    unit_for,
)

__all__ = ["Against", "compare", "compare_html", "comparison_svg"]

Colours = Mapping[str, int]
Curve = Sequence[tuple[float, float]]
_CAPTION = (
    "Mean ± sample standard deviation over the seeds. Times and traffic to the target are over the runs "
    "that reached it."
)
_EQUAL = (
    "{}: what each had come to when the run that came least far had ended. Of the last measurement that was "
    "not later, mean ± sample standard deviation over the seeds."
)
_PAIRED = (
    "Each kind of run against the first, from the seeds that both have: the mean of the differences and "
    "Student's 95 % interval of it. Where zero is inside, so few seeds do not tell them apart."
)
_HOW_TO_READ = (
    "A line is the mean over the seeds, as far as all of them go; the band about it is from the least to the "
    "greatest of them."
)


def compare_html(results: Iterable[Result]) -> str:
    """The whole page, self-contained: charts for each workload, then one table."""
    runs = list(results)
    colours = _colours(runs)
    told = f"{counted(len(runs), 'run')} of {counted(len(colours), 'kind')}"
    body = [header("Comparison of runs", told)]
    if not runs:
        return document("Comparison of runs", [*body, card("Runs", empty("There is no run to compare."))])
    for (workload, kind), groups in grouped(runs).items():
        body.append(f"<h2>{safe(workload)}, {kind}</h2>")
        body += _charts(groups, kind, colours)
        rows = [r for r in compare(runs) if (r.workload, r.kind) == (workload, kind)]
        body.append(card("Figures", _figures(rows, colours) + _common(groups), _CAPTION))
        body += _equal(groups)
        body += _paired(groups)
    return document("Comparison of runs", body)


def comparison_svg(results: Iterable[Result], against: Against = "time", metric: str = "") -> str:
    """One chart as an SVG file of its own, of a `metric`, or of what the runs are judged by.

    Raises `DataError` unless the runs share their workload, and for a metric that none of them has.
    """
    runs = list(results)
    by_workload = grouped(runs)
    if len(by_workload) != 1:
        there = ", ".join(f"{workload} ({kind})" for workload, kind in by_workload) or "none"
        raise DataError(f"one chart shows runs of one workload and kind, and these are of {there}")
    [((_, kind), groups)] = by_workload.items()
    names = metric_names(runs)
    if metric and metric not in names:
        raise DataError(f"no run has measured {metric!r}: there is {', '.join(names) or 'nothing'}")
    if against not in AT:
        raise DataError(f"a chart is against one of {', '.join(AT)}, not {against!r}")
    name = metric or next(iter(names), ACCURACY)
    x, ends = axis(against, kind), [AT[against](r.history[-1]) for r in runs if r.history]
    if against == "bytes" and ends and max(ends) > 4 * min(ends):
        x = replace(x, log=True)
    lines = _series(groups, name, against, _colours(runs))
    return standalone(line_chart(lines, x, axis_of(name, runs), _target(groups, name)))


def _colours(runs: Sequence[Result]) -> Colours:
    labels = dict.fromkeys(g.label for groups in grouped(runs).values() for g in groups)
    return {label: i for i, label in enumerate(labels)}


def _charts(groups: Sequence[RunGroup], kind: Kind, colours: Colours) -> list[str]:
    runs = [r for g in groups for r in g.runs]
    names = metric_names(runs)
    if not names:
        measured = any(r.history for r in runs)
        told = "No measurement was finite." if measured else "No version of these runs was evaluated."
        return [card("Measurements", empty(told))]
    cards = []
    for name, against in ways(names):
        lines = _series(groups, name, against, colours)
        chart = plot(lines, axis(against, kind), axis_of(name, runs), _target(groups, name))
        title = f"{heading(name)} over {TITLES[against]}"
        cards.append(card(title, chart, flaws_text(sum(lacking(r, name) for r in runs))))
    key = legend_list((g.label, colours[g.label]) for g in groups) if len(groups) > 1 else ""
    several = any(len(g.runs) > 1 for g in groups)
    return [key, f'<p class="hint">{_HOW_TO_READ}</p>' if several else "", grid(cards)]


def _series(groups: Sequence[RunGroup], name: str, against: Against, colours: Colours) -> list[Series]:
    at, lines = AT[against], []
    for g in groups:
        colour = colours[g.label]
        curves = [[(at(p), v) for p in r.history if (v := value(p, name)) is not None] for r in g.runs]
        curves = [curve for curve in curves if curve]
        flaws = [at(p) for r in g.runs if lacking(r, name) for p in r.history if value(p, name) is None]
        band = spans(curves) if len(curves) > 1 else []
        if len(curves) > 1 and not band:  # they have no stretch in common
            lines += [Series(g.label, curve, colour, thin=True) for curve in curves]
        points = curves[0] if len(curves) == 1 else [(x, mean) for x, mean, _, _ in band]
        if curves:
            told = [Span(x, low, high) for x, _, low, high in band]
            lines.append(Series(g.label, points, colour, band=told, flaws=flaws))
    return lines


def _target(groups: Sequence[RunGroup], name: str) -> float | None:
    targets = {goal.target for g in groups for r in g.runs if (goal := r.goal).metric == name}
    return targets.pop() if len(targets) == 1 else None


def spans(curves: Sequence[Curve]) -> list[tuple[float, float, float, float]]:
    """(x, mean, least, greatest) of curves over the range that all of them cover, straight between points."""
    low, high = max(c[0][0] for c in curves), min(c[-1][0] for c in curves)
    xs = np.unique([x for c in curves for x, _ in c if low <= x <= high])
    if not xs.size:
        return []
    ys = np.array([np.interp(xs, *np.clip(np.array(c).T, -FARTHEST, FARTHEST)) for c in curves])
    lines = (xs, ys.mean(axis=0), ys.min(axis=0), ys.max(axis=0))
    return list(zip(*(line.tolist() for line in lines), strict=True))


Column = tuple[str, Callable[[SpreadRow], str]]


def _figures(rows: Sequence[SpreadRow], colours: Colours) -> str:
    """The table; columns that say nothing of any row are left out."""
    columns: list[Column] = [
        ("strategy", lambda r: f'<i class="swatch c{colours[r.label] % COLOURS}"></i>{safe(r.label)}'),
        ("seeds", lambda r: count_text(len(r.seeds))),
        ("reached", lambda r: f"{r.reached} of {len(r.seeds)}" if r.aimed else NOTHING),
        ("time to target", lambda r: _spread_cell(r.time_to_target_s, SECONDS)),
        ("uplink to target", lambda r: _spread_cell(r.uplink_to_target, BYTES)),
        ("downlink to target", lambda r: _spread_cell(r.downlink_to_target, BYTES)),
        *_metric_columns(rows),
        *_fairness_columns(rows),
        ("not finite", lambda r: count_text(r.not_finite) if r.not_finite else NOTHING),
        ("updates", lambda r: _spread_cell(r.updates_applied)),
        ("mean staleness", lambda r: _spread_cell(r.staleness_mean)),
        ("uplink", lambda r: _spread_cell(r.uplink_bytes, BYTES)),
        ("downlink", lambda r: _spread_cell(r.downlink_bytes, BYTES)),
        ("real time", lambda r: _spread_cell(r.wall_s, SECONDS)),
    ]
    known = [(head, [cell(r) for r in rows]) for head, cell in columns]
    telling = [(head, cells) for head, cells in known if any(c != NOTHING for c in cells)]
    return table([head for head, _ in telling], zip(*(cells for _, cells in telling), strict=True))


def _equal(groups: Sequence[RunGroup]) -> list[str]:
    """Kinds side by side when all of them were equally far; nothing of one kind."""
    found = equally_far(groups)
    if not found:
        return []
    heads = ["strategy", *found]
    cells = ([_metric_cell(row.metric, row.value) for row in rows] for rows in found.values())
    lines = zip((safe(group.label) for group in groups), *cells, strict=True)
    [metric] = {row.metric for rows in found.values() for row in rows}
    told = _EQUAL.format(heading(metric))
    return [card("At equal time, work and traffic", table(heads, lines), told)]


def _paired(groups: Sequence[RunGroup]) -> list[str]:
    """Kinds against the first, where some ran from the same seeds."""
    rows = paired([run for group in groups for run in group.runs])
    if not any(row.final_value for row in rows):
        return []
    head, lines = paired_lines(rows)
    cells = [[safe(cell) for cell in line] for line in lines]
    return [card(f"More than {rows[0].base}", table(head, cells), _PAIRED)]


def _metric_columns(rows: Sequence[SpreadRow]) -> list[Column]:
    """The last of each metric, and the best of those that rows are judged by, which come first."""
    judged = dict.fromkeys(r.metric for r in rows if r.best_value is not None)
    names = dict.fromkeys([*judged, ACCURACY, *(n for row in rows for n in row.metrics)])
    return [column for name in names for column in _columns_of(name, best=name in (*judged, ACCURACY))]


def _columns_of(name: str, best: bool) -> list[Column]:
    def final(r: SpreadRow) -> str:
        return _metric_cell(name, r.final_accuracy if name == ACCURACY else r.metrics.get(name))

    def best_of(r: SpreadRow) -> str:
        if name == ACCURACY:
            return _metric_cell(name, r.best_accuracy)
        return _metric_cell(name, r.best_value if r.metric == name else None)

    return [(f"final {name}", final), *([(f"best {name}", best_of)] if best else [])]


def _fairness_columns(rows: Sequence[SpreadRow]) -> list[Column]:
    """Of each metric that devices or groups have: how its worst tenth fares, and how far all lie apart."""

    def column(head: str, name: str, of: Callable[[SpreadRow], Mapping[str, Spread]]) -> Column:
        metric = name.rpartition(" over ")[0]
        return f"{head} {name}", lambda r: _metric_cell(metric, of(r).get(name))

    worst = dict.fromkeys(name for r in rows for name in r.worst_tenths)
    apart = dict.fromkeys(name for r in rows for name in r.deviations)
    return [
        *(column("worst tenth,", name, lambda r: r.worst_tenths) for name in worst),
        *(column("deviation,", name, lambda r: r.deviations) for name in apart),
    ]


def _metric_cell(name: str, values: Spread | None) -> str:
    if values is None:
        return NOTHING
    return _spread_cell(values, units_of(name, (values.least, values.greatest)))


def _common(groups: Sequence[RunGroup]) -> str:
    """The settings that all of the runs have in common, as far as they are not the defaults."""
    found = [changed(g.runs[0].config) for g in groups]
    common = {
        k: v
        for k, v in found[0].items()
        if k not in PLACES and k != SEED and all(k in other and other[k] == v for other in found)
    }
    return fold("Settings that all of these runs share", settings_table(common)) if common else ""


def _spread_cell(values: Spread | None, units: tuple[Unit, ...] = COUNT) -> str:
    """Mean and deviation in the unit that suits the mean."""
    if values is None:
        return NOTHING
    unit = unit_for(abs(values.mean), units)
    mean = f"{number_text(values.mean / unit.size)} {unit.name}".strip()
    if values.count == 1:
        return mean
    return f"{mean} <small>± {number_text(values.deviation / unit.size, 2)}</small>"
