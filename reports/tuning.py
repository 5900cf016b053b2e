"""The page of a tuning: the front of value, time and bytes, every trial, and what is recommended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from anabranch.core.config.goal import MIN
from anabranch.core.config.toml import setting_text
from anabranch.reports.against import axis
from anabranch.reports.intervals import mean, mean_interval
from anabranch.reports.metrics import heading, metric_text, units_of
from anabranch.reports.page import (
    card,
    document,
    empty,
    grid,
    header,
    notice,
    standalone,
    table,
    tile,
    tiles,
)
from anabranch.reports.scales import Axis
from anabranch.reports.scatter import Dot, DotKind, scatter
from anabranch.reports.spreads import Spread
from anabranch.reports.text import (
    NOTHING,
    PERCENT,
    bytes_text,
    count_text,
    duration_text,
    number_text,
    percent_text,
    safe,
)

FrontAgainst = Literal["time", "bytes"]
Listing = tuple[list[str], list[list[str]]]  # heads, and rows of plain text
UNLIKE = 4.0  # times that the most is the least, from where on an axis is logarithmic
_FRONT = (
    "A point is a trial, as the mean over its seeds, at one of the shares of the budget that it was "
    "carried to. On the front nothing else that was tried is better in one of value, time and bytes, "
    "and worse in none."
)
_FRESH = (
    "From seeds that took no part in the choice, on the part of the data that run.evaluate_on names: the "
    "mean, and its 95 % interval by Student."
)


@dataclass(frozen=True)
class TunePoint:
    """A trial at a share of the budget, over its seeds. `value` is None where a seed has none.

    At the target where it was reached, which `reached` seeds have; times in virtual seconds.
    """

    trial: int
    share: float
    settings: Mapping[str, Any]
    seeds: int
    value: Spread | None
    reached: int
    time_s: float
    updates: float
    traffic_bytes: float
    on_front: bool = False


@dataclass(frozen=True)
class FreshFigures:
    """What settings have come to from each of the fresh seeds; None where nothing finite was measured."""

    name: str
    settings: Mapping[str, Any]
    seeds: Sequence[int]
    values: Sequence[float | None]
    reached: Sequence[bool]
    times_s: Sequence[float]
    updates: Sequence[int]
    traffic_bytes: Sequence[int]


@dataclass(frozen=True)
class TunedRange:
    """The points of a setting, what was chosen of them, and the end that it is at.

    Empty: it lies between others, or the setting itself ends there.
    """

    path: str
    points: Sequence[Any]
    chosen: Any
    end: str


@dataclass(frozen=True)
class TuneReport:
    """What a tuning came to. `fresh` begins with the recommendation; the settings as given may follow.

    `metric`, `mode` and `target` are what runs are judged by, `aim` is what was to be best, `said` are
    remarks in words.
    """

    strategy: str
    workload: str
    metric: str
    mode: str
    target: float | None
    aim: str
    budget: str
    points: Sequence[TunePoint]
    best: int
    ranges: Sequence[TunedRange]
    fresh: Sequence[FreshFigures]
    said: Sequence[str]
    toml: str

    @property
    def front(self) -> list[TunePoint]:
        """From the cheapest to the best."""
        found = [p for p in self.points if p.on_front]
        return sorted(found, key=lambda p: (p.traffic_bytes, p.time_s, p.trial))


def with_front(points: Sequence[TunePoint], mode: str) -> list[TunePoint]:
    """The same, with those marked to which no other is preferable in value, time and bytes together."""

    def good(p: TunePoint) -> tuple[float, float, float] | None:
        if p.value is None:
            return None
        return (-p.value.mean if mode == MIN else p.value.mean, -p.time_s, -p.traffic_bytes)

    known = [g for p in points if (g := good(p)) is not None]

    def stands(its: tuple[float, float, float]) -> bool:
        return not any(g != its and all(a >= b for a, b in zip(g, its, strict=True)) for g in known)

    return [replace(p, on_front=(g := good(p)) is not None and stands(g)) for p in points]


# --- tables, for the page and the terminal -----------------------------------------------------


def front_table(report: TuneReport) -> Listing:
    """The front, a row each, with the settings that were tuned."""
    return _points_table(report, report.front)


def trials_table(report: TuneReport) -> Listing:
    """Each trial as far as it was carried, in the order of the trials."""
    last = {p.trial: p for p in sorted(report.points, key=lambda p: p.share)}
    return _points_table(report, [last[number] for number in sorted(last)])


def ranges_table(report: TuneReport) -> Listing:
    """What was chosen of what, and whether it is at an end."""
    rows = [
        [r.path, ", ".join(map(setting_text, r.points)), setting_text(r.chosen), r.end or NOTHING]
        for r in report.ranges
    ]
    return ["setting", "tried", "chosen", "at the end"], rows


def fresh_table(report: TuneReport) -> Listing:
    """What the recommendation, and the settings as given, have come to from fresh seeds."""
    heads = ["settings", "seeds", report.metric, "reached", "time", "updates", "bytes"]
    rows = [
        [
            f.name,
            count_text(len(f.seeds)),
            value_text(report.metric, f.values),
            NOTHING if report.target is None else f"{sum(f.reached)} of {len(f.seeds)}",
            used_text(f.times_s, duration_text),
            used_text(f.updates, number_text),
            used_text(f.traffic_bytes, bytes_text),
        ]
        for f in report.fresh
    ]
    return heads, rows


def value_text(metric: str, values: Sequence[float | None]) -> str:
    """An `interval_text` of what runs are judged by; a share ends at 0 and 1."""
    if units_of(metric, values) is PERCENT:
        return interval_text(values, lambda share: percent_text(min(max(share, 0.0), 1.0)))
    return interval_text(values, partial(metric_text, metric))


def used_text(values: Sequence[float], text: Callable[[float], str]) -> str:
    """An `interval_text` of what is used up, and is never less than nothing."""
    return interval_text(values, lambda used: text(max(used, 0.0)))


def interval_text(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    """`81.2 % (79.8 % to 82.6 %)`: the mean and where it may be; of those that are known."""
    known = [float(v) for v in values if v is not None]
    if not known:
        return NOTHING
    middle = text(mean(known))
    between = mean_interval(known)
    lacking = f", {len(values) - len(known)} without" if len(known) < len(values) else ""
    low, high = (middle, middle) if between is None else map(text, between)
    return f"{middle}{lacking}" if low == high else f"{middle} ({low} to {high}{lacking})"


def fresh_text(report: TuneReport) -> str:
    """What is told of the recommendation: its figures from fresh seeds."""
    best = report.fresh[0]
    value = value_text(report.metric, best.values)
    told = f"{report.metric} {value} after {used_text(best.times_s, duration_text)} and "
    told += used_text(best.traffic_bytes, bytes_text)
    if report.target is not None:
        told += f"; target {metric_text(report.metric, report.target)} reached from {sum(best.reached)}"
        told += f" of {len(best.seeds)} seeds"
    return told


def _points_table(report: TuneReport, points: Sequence[TunePoint]) -> Listing:
    paths = [r.path for r in report.ranges]
    heads = ["trial", "budget", report.metric, "time", "updates", "bytes", *paths]
    rows = [
        [
            f"{p.trial}{' (recommended)' if p.trial == report.best else ''}",
            f"{100 * p.share:.0f} %",
            metric_text(report.metric, None if p.value is None else p.value.mean),
            duration_text(p.time_s),
            number_text(p.updates),
            bytes_text(p.traffic_bytes),
            *(setting_text(p.settings[path]) for path in paths),
        ]
        for p in points
    ]
    return heads, rows


# --- drawings ----------------------------------------------------------------------------------


def front_svg(report: TuneReport, against: FrontAgainst = "bytes") -> str:
    """The front over time or bytes, as an SVG file of its own."""
    return standalone(_chart(report, against))


def tuning_html(report: TuneReport) -> str:
    """The whole page, self-contained."""
    title = f"Tuning of {report.strategy} on {report.workload}"
    best = report.fresh[0]
    value = value_text(report.metric, best.values)
    figures = [
        tile(f"{report.metric} from fresh seeds", *_parted(value)),
        tile("virtual time", *_parted(used_text(best.times_s, duration_text))),
        tile("bytes up and down", *_parted(used_text(best.traffic_bytes, bytes_text))),
        tile("trials", count_text(len({p.trial for p in report.points})), report.budget),
    ]
    charts = [
        card(f"{heading(report.metric)} over traffic", _figure(report, "bytes")),
        card(f"{heading(report.metric)} over time", _figure(report, "time")),
    ]
    body = [
        header(title, f"best by {report.aim}; recommended is trial {report.best}"),
        *map(notice, report.said),
        tiles(figures),
        grid(charts),
        card("From fresh seeds", _html(fresh_table(report)), _FRESH),
        card("The front", _html(front_table(report)), _FRONT),
        card("Recommended", f"<pre>{safe(report.toml)}</pre>", "recommended.toml, which runs as it is."),
        card("Ranges", _html(ranges_table(report))),
        card("Trials", _html(trials_table(report)), "Each as far as it was carried."),
    ]
    return document(title, body)


def _parted(text: str) -> tuple[str, str]:
    """A mean, and its interval as a remark."""
    middle, _, between = text.partition(" (")
    return middle, between.removesuffix(")")


def _figure(report: TuneReport, against: FrontAgainst) -> str:
    if all(p.value is None for p in report.points):
        return empty("No trial has measured anything.")
    return _chart(report, against)


def _chart(report: TuneReport, against: FrontAgainst) -> str:
    known = [p for p in report.points if p.value is not None]

    def at(p: TunePoint) -> float:
        return p.time_s if against == "time" else p.traffic_bytes

    x = replace(axis(against, "simulated"), from_zero=False)
    ends = [at(p) for p in known if at(p) > 0]
    x = replace(x, log=bool(ends) and max(ends) > UNLIKE * min(ends))
    y = Axis(
        report.metric, units_of(report.metric, [p.value.mean for p in known if p.value]), from_zero=False
    )
    whole = max((p.share for p in known if p.trial == report.best), default=1.0)

    def dots(chosen: Iterable[TunePoint], size: float = 1.0) -> list[Dot]:
        return [Dot(at(p), p.value.mean, _tip(report, p), size) for p in chosen if p.value is not None]

    best = [p for p in known if p.trial == report.best and p.share == whole]
    kinds = [
        DotKind("others", 7, dots((p for p in known if not p.on_front and p not in best), 0.8)),
        DotKind("on the front", 0, dots(p for p in known if p.on_front and p not in best)),
        DotKind("recommended", 1, dots(best, 1.5)),
    ]
    return scatter(kinds, x, y, report.target)


def _tip(report: TuneReport, p: TunePoint) -> str:
    value = metric_text(report.metric, None if p.value is None else p.value.mean)
    settings = ", ".join(f"{path} = {setting_text(its)}" for path, its in p.settings.items())
    used = f"{duration_text(p.time_s)}, {bytes_text(p.traffic_bytes)}"
    return f"trial {p.trial} at {100 * p.share:.0f} % of the budget: {value} after {used}; {settings}"


def _html(listing: Listing) -> str:
    heads, rows = listing
    return table(heads, ([safe(cell) for cell in row] for row in rows))
