"""The page of several runs: accuracy curves over each other and a table with the spreads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from anabranch.reports.charts import Series, line_chart
from anabranch.reports.compare import Row, Spread, compare, grouped
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
from anabranch.reports.svg import COLOURS
from anabranch.reports.text import (
    NOTHING,
    bytes_text,
    count_text,
    duration_text,
    number_text,
    percent_text,
    safe,
)

Against = Literal["time", "updates", "bytes"]
_AT: dict[Against, Callable[[Point], float]] = {
    "time": lambda p: p.time_s,
    "updates": lambda p: p.updates,
    "bytes": lambda p: p.uplink_bytes + p.downlink_bytes,
}
_TITLES: dict[Against, str] = {"time": "time", "updates": "updates", "bytes": "traffic"}


def compare_html(results: Iterable[Result]) -> str:
    """The whole page, self-contained: charts for each workload, then one table."""
    runs = list(results)
    colours = _colours(runs)
    body = [header("Comparison of runs", f"{count_text(len(runs))} runs, {len(colours)} strategies")]
    if not runs:
        return document("Comparison of runs", [*body, card("Runs", empty("There is no run to compare."))])
    for (workload, kind), group in _by_workload(runs).items():
        body.append(f"<h2>{safe(workload)}, {safe(kind)}</h2>")
        body.append(grid(_cards(group, kind, colours)))
    caption = (
        "Mean ± sample standard deviation over the seeds. Times and traffic to the target are over the runs "
        "that reached it. In the charts a thick line is the mean over seeds, as far as all of them go; "
        "thin lines are the single seeds."
    )
    rows = compare(runs)
    body.append(card("Figures", table(_HEAD, (_cells(r, colours) for r in rows)), caption))
    body += [card("Note", f"<p>{safe(_note(r))}</p>") for r in rows if r.differing]
    return document("Comparison of runs", body)


def comparison_svg(results: Iterable[Result], against: Against = "time") -> str:
    """One chart of runs of one workload as an SVG file of its own."""
    runs = list(results)
    kind = runs[0].kind if runs else "simulated"
    return standalone(_chart(runs, kind, against, _colours(runs)))


def _colours(runs: Sequence[Result]) -> dict[str, int]:
    return {strategy: i for i, strategy in enumerate(dict.fromkeys(r.strategy for r in runs))}


def _by_workload(runs: Sequence[Result]) -> dict[tuple[str, Kind], list[Result]]:
    groups: dict[tuple[str, Kind], list[Result]] = {}
    for r in runs:
        groups.setdefault((r.workload, r.kind), []).append(r)
    return groups


def _cards(runs: Sequence[Result], kind: Kind, colours: dict[str, int]) -> list[str]:
    if not any(r.history for r in runs):
        return [card("Accuracy", empty("No version of these runs was evaluated."))]
    return [card(f"Accuracy over {t}", _chart(runs, kind, a, colours)) for a, t in _TITLES.items()]


def _chart(runs: Sequence[Result], kind: Kind, against: Against, colours: dict[str, int]) -> str:
    axes: dict[Against, Axis] = {"time": time_axis(kind), "updates": UPDATES, "bytes": TRAFFIC}
    at, lines = _AT[against], []
    for (_, _, strategy), group in grouped(runs).items():
        curves = [[(at(p), p.accuracy) for p in r.history] for r in group if r.history]
        if not curves:
            continue
        if len(curves) > 1:
            lines += [Series(strategy, c, colours[strategy], thin=True) for c in curves]
        lines.append(Series(strategy, mean_curve(curves), colours[strategy]))
    targets = {r.target_accuracy for r in runs}
    target = targets.pop() if len(targets) == 1 else 0.0
    return line_chart(lines, axes[against], ACCURACY, target if target > 0 else None)


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


_HEAD = (
    "strategy",
    "workload",
    "seeds",
    "reached",
    "time to target",
    "traffic to target",
    "final accuracy",
    "best accuracy",
    "updates",
    "mean staleness",
    "uplink",
    "downlink",
)


def _cells(row: Row, colours: dict[str, int]) -> tuple[str, ...]:
    colour = colours[row.strategy] % COLOURS
    return (
        f'<span class="swatch c{colour}"></span>{safe(row.strategy)}',
        f"{safe(row.workload)}, {row.kind}",
        count_text(len(row.seeds)),
        f"{row.reached} of {len(row.seeds)}",
        _spread_text(row.time_to_target_s, duration_text),
        _spread_text(row.bytes_to_target, bytes_text),
        _spread_text(row.final_accuracy, percent_text),
        _spread_text(row.best_accuracy, percent_text),
        _spread_text(row.updates_applied, number_text),
        _spread_text(row.staleness_mean, number_text),
        _spread_text(row.uplink_bytes, bytes_text),
        _spread_text(row.downlink_bytes, bytes_text),
    )


def _spread_text(values: Spread | None, shown: Callable[[float], str]) -> str:
    if values is None:
        return NOTHING
    if values.count == 1:
        return shown(values.mean)
    return f"{shown(values.mean)} <small>± {shown(values.deviation)}</small>"


def _note(row: Row) -> str:
    return f"The runs of {row.strategy} on {row.workload} differ in more than the seed: {', '.join(row.differing)}."
