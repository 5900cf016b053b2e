"""Charts as plain SVG, 380 units wide: histogram, bars, and an area over many devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anabranch.reports.scales import Axis, AxisScale
from anabranch.reports.svg import (
    BOTTOM,
    CHAR_WIDTH,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    XY,
    frame,
    hue,
    legend,
    path,
    rect,
    svg,
    text,
)
from anabranch.reports.text import clipped, count_text

BINS_MAX = 30
STEPS_MAX = 1000  # of a ranked area
BAR_ROW, BAR_LEFT, BAR_RIGHT, BAR_LABEL_CHARS = 18.0, 118.0, 80.0, 15


Part = tuple[str, int]  # the name of a part of every bar, and its colour


@dataclass(frozen=True)
class Bar:
    """A horizontal bar: a label and the lengths of its stacked parts."""

    label: str
    parts: Sequence[int]


def histogram(counts: Mapping[int, int], x: Axis, y: Axis) -> str:
    """Vertical bars of whole numbers -> counts, in equal bins when there are many numbers."""
    bins, width = binned(counts)
    ys = y.scale([0.0, *map(float, bins.values())], HEIGHT - BOTTOM, TOP)
    domain = (min(bins) - 0.5, max(bins) + width - 0.5)
    xs = AxisScale(x.units[0], (), 1.0, domain, (LEFT, WIDTH - RIGHT))
    parts = frame(x, y, xs, ys, HEIGHT)
    gap = 0.15 * (xs(width) - xs(0))
    label_width = (len(str(max(bins))) + 1.5) * CHAR_WIDTH
    label_every = math.ceil(label_width / (xs(width) - xs(0)))
    for i, (start, n) in enumerate(bins.items()):
        left, right = xs(start - 0.5) + gap / 2, xs(start + width - 0.5) - gap / 2
        span = str(start) if width == 1 else f"{start} to {start + width - 1}"
        tip = f"{x.label} {span}: {count_text(n)}"
        parts.append(rect(left, ys(n), right - left, ys(0) - ys(n), 0, tip))
        if i % label_every == 0:
            middle = (left + right) / 2 if width == 1 else left
            parts.append(text(middle, HEIGHT - BOTTOM + 17, str(start), "tick mid"))
    return svg(parts, HEIGHT, f"histogram of {x.label}")


def binned(counts: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Equal bins from 0 on, empty ones included: first number of a bin -> count; the bins' width."""
    end = max(counts, default=0) + 1
    widths = (mantissa * 10**power for power in itertools.count() for mantissa in (1, 2, 5))
    width = next(w for w in widths if math.ceil(end / w) <= BINS_MAX)
    bins = dict.fromkeys(range(0, end, width), 0)
    for number, n in counts.items():
        bins[number // width * width] += n
    return bins, width


def bar_chart(bars: Sequence[Bar], parts: Sequence[Part], label: str) -> str:
    """Horizontal stacked bars, one row each."""
    rows, top = legend(parts if len(parts) > 1 else [], above=4)
    per_unit = (WIDTH - BAR_LEFT - BAR_RIGHT) / max([1, *(sum(b.parts) for b in bars)])
    for i, bar in enumerate(bars):
        y, x = top + BAR_ROW * i, BAR_LEFT
        rows.append(text(x - 6, y + 12.5, clipped(bar.label, BAR_LABEL_CHARS), "tick end", bar.label))
        for (name, colour), n in zip(parts, bar.parts, strict=True):
            if n:
                tip = f"{bar.label}: {count_text(n)} {name}"
                rows.append(rect(x, y + 2, n * per_unit, BAR_ROW - 5, colour, tip))
                x += n * per_unit
        rows.append(text(x + 5, y + 12.5, " + ".join(count_text(n) for n in bar.parts), "tick"))
    return svg(rows, top + BAR_ROW * len(bars) + 6, label)


def ranked_area(bars: Sequence[Bar], parts: Sequence[Part], x: Axis, y: Axis) -> str:
    """Many bars, in the order given, as one stacked area without their labels.

    Of many neighbours share a step, which is as high as the one in their middle: no screen could show more.
    """
    key, top = legend(parts)
    height = HEIGHT + top - TOP
    stacked = np.cumsum(np.array([b.parts for b in bars], dtype=np.int64).T, axis=0)
    xs = x.scale([0.0, float(stacked.shape[1])], LEFT, WIDTH - RIGHT, snug=True)
    ys = y.scale([0.0, float(stacked.max())], height - BOTTOM, top)
    out = [*frame(x, y, xs, ys, height), *key]
    edges = np.linspace(0, len(bars), min(len(bars), STEPS_MAX) + 1).round().astype(np.int64)
    stacked = stacked[:, (edges[:-1] + edges[1:]) // 2]
    below = np.zeros_like(stacked[0])
    for (_, colour), upper in zip(parts, stacked, strict=True):
        outline = _steps(upper, edges, xs, ys) + _steps(below, edges, xs, ys)[::-1]
        out.append(f'<path class="area {hue(colour)}" d="{path(outline)}Z"/>')
        below = upper
    return svg(out, height, f"{y.label} by {x.label}")


def _steps(
    heights: npt.NDArray[np.int64], edges: npt.NDArray[np.int64], xs: AxisScale, ys: AxisScale
) -> list[XY]:
    return [(xs(float(edges[i + side])), ys(float(n))) for i, n in enumerate(heights) for side in (0, 1)]
