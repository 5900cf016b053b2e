"""The arena as a picture: how far strategies end over rounds with momentum, a line a cell."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from anabranch.reports.page import standalone
from anabranch.reports.scales import AxisScale
from anabranch.reports.svg import WIDTH, hue, svg, text
from anabranch.reports.text import COUNT
from benchmarks.arena.cells import FAULTS, FAULTS_SAID, LINKS, LINKS_SAID
from benchmarks.arena.intervals import Interval
from benchmarks.arena.rows import SPARSE
from benchmarks.arena.standings import MARK, MET, WORDS, Standing

LEFT, RIGHT = 120.0, 12.0
KEY, BELOW = 40.0, 34.0  # what the key takes, and what is under the drawing
HEAD, STEP, GAP = 24.0, 5.5, 8.0  # a group's title; from a strategy to the next; between cells
BESIDE = 38  # of the number of an arrow, clear of that of the line above
LEAST, MOST, EVERY = -10.0, 3.0, 2  # points: beyond them an arrow and the number
RADIUS = 2.2
TITLE = f"points over {WORDS[MARK]}"
SPARSELY = "*"  # behind the name of a split where all travel by the sparse chain


def drawn(standings: Sequence[Standing]) -> str:
    """An SVG file of these, in groups of a workload, links and who leaves."""
    scale = scale_of(LEAST, MOST, EVERY)
    parts: list[str] = []
    y = KEY
    for title, group in itertools.groupby(sorted(standings, key=_group), key=_group):
        parts.append(text(4, y + 17, _heading(*title), "legend"))
        y += HEAD
        for standing in group:
            parts += _cell(standing, y, scale)
            y += STEP * len(MET) + GAP
    return standalone(svg([*_key(), *axis(scale, KEY, y, TITLE), *parts], y + BELOW, TITLE))


def _group(standing: Standing) -> tuple[str, int, int]:
    cell = standing.cell
    return cell.workload, LINKS.index(cell.links), FAULTS.index(cell.faults)


def _heading(workload: str, links: int, faults: int) -> str:
    return f"{workload}, {LINKS_SAID[LINKS[links]]}, {FAULTS_SAID[FAULTS[faults]]}"


def scale_of(least: float, most: float, every: int) -> AxisScale:
    """Points from the left of a drawing to its right, with a tick at so many."""
    ticks = tuple(float(tick) for tick in range(round(least), round(most) + 1, every))
    return AxisScale(COUNT[0], ticks, float(every), (least, most), (LEFT, WIDTH - RIGHT))


def axis(scale: AxisScale, top: float, floor: float, title: str) -> list[str]:
    """The grid from `top` down to `floor`, and the numbers and the title beneath."""
    low, high = scale.pixels
    parts = []
    for tick in scale.ticks:
        at = scale.tick_pixel(tick)
        parts.append(f'<path class="{"grid" if tick else "axis"}" d="M{at:.1f} {top:.1f}V{floor:.1f}"/>')
        parts.append(text(at, floor + 14, f"{tick:+g}" if tick else "0", "tick mid"))
    return [*parts, text((low + high) / 2, floor + 29, title, "title mid")]


def _key() -> list[str]:
    """The strategies, and what a ring says."""
    parts = []
    for i, name in enumerate(MET):
        x, y = 4 + (i % 2) * WIDTH / 2, 10 + 17 * (i // 2)
        parts += [_bar(x, x + 18, y, i), dot(x + 9, y, i, told=True)]
        parts.append(text(x + 24, y + 4, WORDS[name].replace("`", ""), "legend"))
    return parts


def _cell(standing: Standing, y: float, scale: AxisScale) -> list[str]:
    label = standing.cell.split + (SPARSELY if standing.chain == SPARSE else "")
    parts = [text(LEFT - 8, y + STEP * len(MET) / 2 + 4, label, "tick end")]
    aside = False
    for i, name in enumerate(MET):
        found, at = standing.of[name], y + STEP * (i + 0.5)
        if LEAST <= found.mean <= MOST:
            parts += _interval(found, at, i, scale)
            aside = False
        else:
            parts += _beyond(found.mean, at, i, aside)
            aside = not aside
    return parts


def _interval(found: Interval, y: float, colour: int, scale: AxisScale) -> list[str]:
    low, high = (scale(min(max(end, LEAST), MOST)) for end in (found.low, found.high))
    told = found.above or found.below
    return [_bar(low, high, y, colour), dot(scale(found.mean), y, colour, told)]


def _bar(low: float, high: float, y: float, colour: int) -> str:
    return f'<path class="line {hue(colour)}" d="M{low:.1f} {y:.1f}H{high:.1f}" style="stroke-width:1.2"/>'


def _beyond(points: float, y: float, colour: int, aside: bool) -> list[str]:
    """An arrow at the edge that it is beyond, and the number: further in if it stands aside."""
    edge, inward, anchor = (LEFT, 1, "tick") if points < LEAST else (WIDTH - RIGHT, -1, "tick end")
    return [
        edge_arrow(points < LEAST, y, colour),
        text(edge + (8 + BESIDE * aside) * inward, y + 4, f"{points:+.1f}", anchor),
    ]


def edge_arrow(under: bool, y: float, colour: int) -> str:
    """What is beyond an edge of the drawing: under its least value, or over its most."""
    edge, inward = (LEFT, 6) if under else (WIDTH - RIGHT, -6)
    return f'<path class="bar {hue(colour)}" d="M{edge:.1f} {y:.1f}l{inward} -3v6z"/>'


def dot(x: float, y: float, colour: int, told: bool) -> str:
    """Filled where the whole interval is over or under the mark, a ring where it is level with it."""
    fill = "" if told else ' style="fill:var(--card);stroke:var(--hue);stroke-width:1.2"'
    return f'<circle class="dot {hue(colour)}" cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS:g}"{fill}/>'
