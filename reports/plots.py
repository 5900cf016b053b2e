"""Curves over a common axis, as SVG: lines, bands about them, and marks where a figure was not finite.

The lines stand in an inner drawing of their own, whose window plot.js moves when a reader zooms; axis, legend
and target are around it, so that nothing is written over a curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from anabranch.reports.scales import Axis, AxisScale
from anabranch.reports.svg import (
    BOTTOM,
    CHAR_WIDTH,
    HEIGHT,
    LEFT,
    RIGHT,
    TITLE_ABOVE,
    TOP,
    WIDTH,
    XY,
    frame,
    hue,
    legend,
    path,
    svg,
    text,
)
from anabranch.reports.text import safe

T = TypeVar("T")

PATH_POINTS_MAX, TIP_POINTS_MAX, DOTS_MAX, FLAWS_MAX = 1500, 150, 40, 200
UNLIKE = 4.0  # times as long as another: on a linear axis one of the two would be a sliver
HIDDEN = ' hidden=""'
FLAW_ROW = 12.0  # above the curves, for the marks


class Span(NamedTuple):
    """At `x` the curves lie between `low` and `high`."""

    x: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """A named curve through (x, y) points in base units.

    `band` is what it is the mean of; `flaws` are where a measurement was not finite. A `thin` one gets
    neither an entry in the legend nor tips.
    """

    name: str
    points: Sequence[XY]
    colour: int = 0
    thin: bool = False
    band: Sequence[Span] = ()
    flaws: Sequence[float] = ()

    @property
    def xs(self) -> list[float]:
        """Where anything of it is."""
        return [*(x for x, _ in self.points), *(s.x for s in self.band), *self.flaws]

    @property
    def ys(self) -> list[float]:
        """How high anything of it is."""
        return [*(y for _, y in self.points), *(v for s in self.band for v in (s.low, s.high))]


def plot(series: Sequence[Series], x: Axis, y: Axis, target: float | None = None, names: bool = False) -> str:
    """The curves as one figure for a page, with a switch to a logarithmic axis where that shows more.

    It is logarithmic to begin with where one curve is much longer than another.
    """
    linear = line_chart(series, replace(x, log=False), y, target, names)
    ends = [max(s.xs) for s in series if s.xs]
    positive = sorted({v for s in series for v in s.xs if v > 0})
    if len(series) < 2 or len(positive) < 3 or positive[-1] < UNLIKE * positive[0]:
        return figure([("", linear)])
    log = line_chart(series, replace(x, log=True), y, target, names)
    unlike = max(ends) > UNLIKE * min(ends)
    return figure([("linear", linear), ("logarithmic", log)], shown=int(unlike))


def figure(drawings: Sequence[tuple[str, str]], shown: int = 0) -> str:
    """Drawings of the same, of which one is shown; plot.js puts the switch and the zoom to them."""
    parts = [
        f'<div data-way="{safe(way)}"{"" if i == shown else HIDDEN}>{drawing}</div>'
        for i, (way, drawing) in enumerate(drawings)
    ]
    return f'<figure class="plot">{"".join(parts)}</figure>'


def line_chart(
    series: Sequence[Series], x: Axis, y: Axis, target: float | None = None, names: bool = True
) -> str:
    """Curves over common axes, with a dashed target; `names`: with a legend above where there are several."""
    thick = [s for s in series if not s.thin]
    several = len(thick) > 1
    key, top = legend([(s.name, s.colour) for s in thick] if several and names else [])
    flaw_row = FLAW_ROW if any(s.flaws for s in series) else 0.0
    top += flaw_row
    height = HEIGHT + top - TOP
    xs = x.scale([v for s in series for v in s.xs], LEFT, WIDTH - RIGHT, snug=True)
    levels = [v for s in series for v in s.ys] + ([] if target is None else [target])
    ys = y.scale(levels, height - BOTTOM, top)
    inner = [_band(s, xs, ys) for s in series if s.band]
    inner += [_line(s, xs, ys) for s in sorted(series, key=lambda s: not s.thin)]
    for s in thick:
        inner += [*_dots(s, xs, ys, several), *_flaws(s, xs, top, several)]
    around = [*frame(x, y, xs, ys, height, flaw_row), *key]
    around += [] if target is None else target_line(target, ys, top - flaw_row)
    label = f"{y.label} against {x.label}"
    return svg([*around, _window(inner, xs, top, height)], height, label)


def _window(inner: Sequence[str], xs: AxisScale, top: float, height: float) -> str:
    """The inner drawing, in the coordinates of the outer one; what the axis shows, for plot.js."""
    low, high = xs.domain
    width, above = WIDTH - RIGHT - LEFT, FLAW_ROW + 6
    upper, tall = top - above, height - BOTTOM - top + above + 2
    place = f'x="{LEFT:g}" y="{upper:g}" width="{width:g}" height="{tall:g}"'
    view = f'viewBox="{LEFT:g} {upper:g} {width:g} {tall:g}" preserveAspectRatio="none"'
    told = f'data-low="{low:.9g}" data-high="{high:.9g}" data-log="{int(xs.log)}"'
    return f'<svg class="window" {place} {view} {told}>{"".join(inner)}</svg>'


def target_line(target: float, ys: AxisScale, top: float) -> list[str]:
    """A dashed line, and what it is beside the title of the axis, above `top`: never over a curve."""
    at, end, label = ys(target), WIDTH - RIGHT, f"target {ys.value_text(target)}"
    start = end - CHAR_WIDTH * len(label) - 26
    row = top - TITLE_ABOVE
    return [
        f'<path class="target" d="M{LEFT:.1f} {at:.1f}H{end:.1f}"/>',
        f'<path class="target" d="M{start:.1f} {row - 4:.1f}h20"/>',
        text(end, row, label, "target-label end"),
    ]


def _line(series: Series, xs: AxisScale, ys: AxisScale) -> str:
    points = [(xs(a), ys(b)) for a, b in sampled(series.points, PATH_POINTS_MAX)]
    style = "line thin" if series.thin else "line"
    return f'<path class="{style} {hue(series.colour)}" d="{path(points, 2)}"/>' if len(points) > 1 else ""


def _band(series: Series, xs: AxisScale, ys: AxisScale) -> str:
    spans = sampled(series.band, PATH_POINTS_MAX)
    outline = [(xs(s.x), ys(s.high)) for s in spans] + [(xs(s.x), ys(s.low)) for s in reversed(spans)]
    return f'<path class="band {hue(series.colour)}" d="{path(outline, 2)}Z"/>'


def _dots(series: Series, xs: AxisScale, ys: AxisScale, several: bool) -> list[str]:
    """Points that answer the pointer; drawn only where they are few and not in each other's way."""
    style = "dot hidden" if several or len(series.points) > DOTS_MAX else "dot"
    prefix = f"{series.name}: " if several else ""
    spans = {s.x: s for s in series.band}
    out = []
    for a, b in sampled(series.points, TIP_POINTS_MAX):
        of = spans.get(a)
        between = "" if of is None else f" ({ys.value_text(of.low)} to {ys.value_text(of.high)})"
        tip = safe(f"{prefix}{ys.value_text(b)}{between} at {xs.value_text(a)}")
        # A line without a length has a round end all the same, whatever the window is stretched to.
        out.append(
            f'<path class="{style} {hue(series.colour)}" d="M{xs(a):.2f} {ys(b):.2f}h0" data-tip="{tip}"/>'
        )
    return out


def _flaws(series: Series, xs: AxisScale, top: float, several: bool) -> list[str]:
    """A mark above the curves for each measurement that was not finite."""
    prefix, out = f"{series.name}: " if several else "", []
    for x in sampled(series.flaws, FLAWS_MAX):
        tip = safe(f"{prefix}not finite at {xs.value_text(x)}")
        at = f"M{xs(x):.2f} {top - FLAW_ROW:.1f}v7"
        out.append(f'<path class="flaw {hue(series.colour)}" d="{at}" data-tip="{tip}"/>')
    return out


def sampled(points: Sequence[T], count_max: int) -> Sequence[T]:
    """At most so many of the points, evenly, the first and the last among them."""
    if len(points) <= count_max:
        return points
    return [points[i] for i in np.linspace(0, len(points) - 1, count_max).round().astype(int)]
