"""The pieces of which the charts are made: axes, legends, texts and bars, as SVG strings.

Colours are the classes `c0` to `c7` of style.css, so that they follow the light or dark scheme.
Elements that carry `data-tip` show that text under the pointer (hover.js).
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.reports.scales import Axis, AxisScale
from anabranch.reports.text import clipped, safe

WIDTH, HEIGHT = 380.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 14.0, 32.0, 46.0
COLOURS = 8
TITLE_ABOVE = 13.0  # the baseline of the title of the vertical axis, above the drawing
LEGEND_ROW, LEGEND_CHARS_MAX = 18.0, 40
CHAR_WIDTH = 7.0  # of the charts' 12-unit type, on average: SVG cannot measure its texts

XY = tuple[float, float]


def svg(parts: Sequence[str], height: float, label: str) -> str:
    """A whole drawing, `WIDTH` units wide, with a name for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" role="img" '
        f'aria-label="{safe(label)}">{"".join(parts)}</svg>'
    )


def frame(x: Axis, y: Axis, xs: AxisScale, ys: AxisScale, height: float, above: float = 0.0) -> list[str]:
    """Grid lines, tick labels and axis titles; `above`: room between the drawing and the upper title."""
    right, floor, top = WIDTH - RIGHT, height - BOTTOM, min(ys.pixels)
    out = []
    for tick in ys.ticks:
        at = ys.tick_pixel(tick)
        out.append(f'<path class="grid" d="M{LEFT:.1f} {at:.1f}H{right:.1f}"/>')
        out.append(text(LEFT - 6, at + 4, ys.tick_text(tick), "tick end", room=LEFT - 8))
    for tick in xs.ticks:
        at = xs.tick_pixel(tick)
        out.append(f'<path class="axis x" d="M{at:.1f} {floor:.1f}v4"/>')
        label = xs.tick_text(tick)
        within = min(at, WIDTH - CHAR_WIDTH * len(label) / 2)  # the last stands at the drawing's edge
        out.append(text(within, floor + 17, label, "tick mid x"))
    out.append(f'<path class="axis" d="M{LEFT:.1f} {floor:.1f}H{right:.1f}"/>')
    out.append(text(4, top - TITLE_ABOVE - above, y.title(ys.unit), "title"))
    out.append(text((LEFT + right) / 2, height - 8, x.title(xs.unit), "title mid"))
    return out


def legend(entries: Sequence[tuple[str, int]], above: float = TOP) -> tuple[list[str], float]:
    """(name, colour) entries in as many rows as they need, and where the drawing may begin."""
    out, x, y = [], 4.0, 4.0
    for name, colour in entries:
        short = clipped(name, LEGEND_CHARS_MAX)
        width = 30 + CHAR_WIDTH * len(short)
        if x > 4.0 and x + width > WIDTH:
            x, y = 4.0, y + LEGEND_ROW
        out.append(f'<path class="line {hue(colour)}" d="M{x:.1f} {y + 5:.1f}h14"/>')
        out.append(text(x + 18, y + 9, short, "legend"))
        x += width
    return out, (y + LEGEND_ROW + above if entries else above)


def hue(colour: int) -> str:
    """The classes of a colour; a palette run through once goes on with dashed lines."""
    return f"c{colour % COLOURS}" + (" dashed" if colour >= COLOURS else "")


def rect(x: float, y: float, width: float, height: float, colour: int, tip: str) -> str:
    """A bar that tells its numbers."""
    return (
        f'<rect class="bar {hue(colour)}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" data-tip="{safe(tip)}"/>'
    )


def text(x: float, y: float, content: str, style: str, tip: str = "", room: float = WIDTH) -> str:
    """A line of text, escaped, with its baseline at `y`; set narrower where it has no such room."""
    more = f' data-tip="{safe(tip)}"' if tip else ""
    if CHAR_WIDTH * len(content) > room:
        more += f' textLength="{room:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}"{more}>{safe(content)}</text>'


def path(points: Sequence[XY], digits: int = 1) -> str:
    """Path data through the points."""
    return "M" + "L".join(f"{a:.{digits}f} {b:.{digits}f}" for a, b in points)
