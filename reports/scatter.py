"""Points of several kinds over common axes, as SVG: each tells what it is under the pointer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.reports.plots import target_line
from anabranch.reports.scales import Axis
from anabranch.reports.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    frame,
    hue,
    legend,
    svg,
)
from anabranch.reports.text import safe

RADIUS = 3.5


@dataclass(frozen=True)
class Dot:
    """A point in base units, and its words; `size` times as large as others."""

    x: float
    y: float
    tip: str
    size: float = 1.0


@dataclass(frozen=True)
class DotKind:
    """Points of a name and a colour."""

    name: str
    colour: int
    dots: Sequence[Dot]


def scatter(kinds: Sequence[DotKind], x: Axis, y: Axis, target: float | None = None) -> str:
    """The points, later kinds over earlier ones, with a legend above and a dashed target."""
    shown = [kind for kind in kinds if kind.dots]
    key, top = legend([(kind.name, kind.colour) for kind in shown], above=TOP)
    height = HEIGHT + top - TOP
    dots = [dot for kind in shown for dot in kind.dots]
    levels = [dot.y for dot in dots] + ([] if target is None else [target])
    xs = x.scale([dot.x for dot in dots], LEFT, WIDTH - RIGHT)
    ys = y.scale(levels, height - BOTTOM, top)
    parts = [*frame(x, y, xs, ys, height), *key]
    parts += [] if target is None else target_line(target, ys, top)
    for kind in shown:
        for dot in kind.dots:
            at = f'cx="{xs(dot.x):.1f}" cy="{ys(dot.y):.1f}" r="{RADIUS * dot.size:.1f}"'
            parts.append(f'<circle class="dot {hue(kind.colour)}" {at} data-tip="{safe(dot.tip)}"/>')
    return svg(parts, height, f"{y.label} against {x.label}")
