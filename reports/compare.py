"""The page of several runs: accuracy curves over each other and a table with the spreads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from anabranch.core.errors import DataError
from anabranch.reports.charts import Series, line_chart
from anabranch.reports.page import (
    ACCURACY,
    TRAFFIC,
    UPDATES,
    card,
    document,
    empty,
    grid,
    header,
    standalone,
    table,
    time_axis,
)
from anabranch.reports.result import Kind, Point, Result
from anabranch.reports.scales import Axis
from anabranch.reports.spreads import Group, Row, Spread, compare, grouped
from anabranch.reports.svg import COLOURS
from anabranch.reports.text import (
    BYTES,
    COUNT,
    NOTHING,
    PERCENT,
    SECONDS,
    Unit,
    count_text,
    number_text,
    safe,
    unit_for,
)

__all__ = ["Against", "compare", "compare_html", "comparison_svg", "mean_curve"]

Against = Literal["time", "updates", "bytes"]
Groups = Sequence[Group]
_AT: dict[Against, Callable[[Point], float]] = {
    "time": lambda p: p.time_s,
    "updates": lambda p: p.updates,
    "bytes": lambda p: p.uplink_bytes + p.downlink_bytes,
}
UNLIKE = 4
_TITLES: dict[Against, str] = {"time": "time", "updates": "updates", "bytes": "traffic"}


def compare_html(results: Iterable[Result]) -> str:
    """The whole page, self-contained: charts for each workload, then one table."""
    runs = list(results)
    colours = _colours(runs)
    body = [header("Comparison of runs", f"{count_text(len(runs))} runs of {count_text(len(colours))} kinds")]
    if not runs:
        return document("Comparison of runs", [*body, card("Runs", empty("There is no run to compare."))])
    for (workload, kind), groups in grouped(runs).items():
        body.append(f"<h2>{safe(workload)}, {kind}</h2>")
        body.append(grid(_cards(groups, kind, colours)))
        rows = [r for r in compare(runs) if (r.workload, r.kind) == (workload, kind)]
        body.append(card("Figures", table(_HEAD, (_cells(r, colours) for r in rows)), _CAPTION))
    return document("Comparison of runs", body)


def comparison_svg(results: Iterable[Result], against: Against = "time") -> str:
    """One chart as an SVG file of its own. Raises `DataError` unless the runs share their workload."""
    runs = list(results)
    groups = grouped(runs)
    if len(groups) != 1:
        raise DataError(
            f"one chart shows runs of one workload and kind, not of {len(groups)}: {list(groups)}"
        )
    [((_, kind), alike)] = groups.items()
    return standalone(_chart(alike, kind, against, _colours(runs)))


def _colours(runs: Sequence[Result]) -> dict[str, int]:
    labels = dict.fromkeys(g.label for groups in grouped(runs).values() for g in groups)
    return {label: i for i, label in enumerate(labels)}


def _cards(groups: Groups, kind: Kind, colours: dict[str, int]) -> list[str]:
    if not any(r.history for g in groups for r in g.runs):
        return [card("Accuracy", empty("No version of these runs was evaluated."))]
    return [card(f"Accuracy over {t}", _chart(groups, kind, a, colours)) for a, t in _TITLES.items()]


def _chart(groups: Groups, kind: Kind, against: Against, colours: dict[str, int]) -> str:
    wide = against == "bytes" and _are_unlike([r for g in groups for r in g.runs])
    axes: dict[Against, Axis] = {
        "time": time_axis(kind),
        "updates": UPDATES,
        "bytes": replace(TRAFFIC, log=True) if wide else TRAFFIC,
    }
    at, lines = _AT[against], []
    for g in groups:
        curves = [
            [(at(p), p.accuracy) for p in r.history if p.accuracy is not None and (at(p) > 0 or not wide)]
            for r in g.runs
        ]
        curves = [curve for curve in curves if curve]
        if not curves:
            continue
        if len(curves) > 1:
            lines += [Series(g.label, c, colours[g.label], thin=True) for c in curves]
        lines.append(Series(g.label, mean_curve(curves), colours[g.label]))
    targets = {r.target_accuracy for g in groups for r in g.runs}
    target = targets.pop() if len(targets) == 1 else 0.0
    return line_chart(lines, axes[against], ACCURACY, target if target > 0 else None)


def _are_unlike(runs: Sequence[Result]) -> bool:
    """Whether the run of the least traffic would be lost on a linear axis."""
    known = [total for r in runs if (total := r.uplink_bytes + r.downlink_bytes) > 0]
    return bool(known) and max(known) > UNLIKE * min(known)


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean of curves over the range that all of them cover, straight between their points."""
    if len(curves) == 1:
        return list(curves[0])
    low, high = max(c[0][0] for c in curves), min(c[-1][0] for c in curves)
    xs = np.unique([x for c in curves for x, _ in c if low <= x <= high])
    if not xs.size:
        return []
    ys = np.mean([np.interp(xs, *np.array(c).T) for c in curves], axis=0)
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


_CAPTION = (
    "Mean ± sample standard deviation over the seeds. Times and traffic to the target are over the runs "
    "that reached it. In the charts a thick line is the mean over the seeds, as far as all of them go; "
    "thin lines are the single seeds."
)
_HEAD = (
    "strategy",
    "seeds",
    "reached",
    "time to target",
    "uplink to target",
    "downlink to target",
    "final accuracy",
    "best accuracy",
    "updates",
    "mean staleness",
    "uplink",
    "downlink",
)


def _cells(row: Row, colours: dict[str, int]) -> tuple[str, ...]:
    colour = colours[row.label] % COLOURS
    return (
        f'<span class="swatch c{colour}"></span>{safe(row.label)}',
        count_text(len(row.seeds)),
        f"{row.reached} of {len(row.seeds)}",
        _spread_cell(row.time_to_target_s, SECONDS),
        _spread_cell(row.uplink_to_target, BYTES),
        _spread_cell(row.downlink_to_target, BYTES),
        _spread_cell(row.final_accuracy, PERCENT),
        _spread_cell(row.best_accuracy, PERCENT),
        _spread_cell(row.updates_applied),
        _spread_cell(row.staleness_mean),
        _spread_cell(row.uplink_bytes, BYTES),
        _spread_cell(row.downlink_bytes, BYTES),
    )


def _spread_cell(values: Spread | None, units: tuple[Unit, ...] = COUNT) -> str:
    """Mean and deviation in the unit that suits the mean."""
    if values is None:
        return NOTHING
    unit = unit_for(values.mean, units)
    mean = f"{number_text(values.mean / unit.size)} {unit.name}".strip()
    if values.count == 1:
        return mean
    return f"{mean} <small>± {number_text(values.deviation / unit.size, 2)}</small>"
