"""Which units of the model were trained when, and by which devices."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.reports.page import card, time_axis
from anabranch.reports.result import Coverage, Result
from anabranch.reports.scales import Axis
from anabranch.reports.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, frame, hue, svg, text
from anabranch.reports.text import count_text, percent_text

GROUPS_MAX = 6
SHADES = 8

Shares = Sequence[Sequence[float]]  # [row][column], from 0 to 1


def coverage_cards(r: Result) -> list[str]:
    """For each group a card with two pictures; none for a run of whole models."""
    cards = []
    for c in r.coverage[:GROUPS_MAX]:
        pictures = over_time(c, time_axis(r.kind)) + by_device(c)
        caption = (
            "Above, the share of the applied updates of a time that trained the unit; below, the share of "
            f"each device's. {_evenness(c)}"
        )
        cards.append(card(f"Who trained which units of {c.group}", pictures, caption))
    left_out = len(r.coverage) - GROUPS_MAX
    if left_out > 0:
        cards.append(card("Other groups", f"<p>{left_out} more groups of units are in result.json.</p>"))
    return cards


def over_time(c: Coverage, axis: Axis) -> str:
    """Units (rows) over time (columns)."""
    shares = [
        [n / max(1, size * updates) for n, updates in zip(row, c.updates, strict=True)]
        for row, size in zip(c.trained, c.row_units, strict=True)
    ]
    end = c.slot_s * len(c.updates)
    return _heat(shares, axis, end, f"units of {c.group} over time", c.units)


def by_device(c: Coverage) -> str:
    """Units (rows) by device (columns), the busiest first."""
    shares = [
        [c.device_trained[name][row] / max(1, size * updates) for name, updates in c.device_updates.items()]
        for row, size in enumerate(c.row_units)
    ]
    axis = Axis("devices, the busiest first", whole=True)
    return _heat(shares, axis, float(len(c.device_updates)), f"units of {c.group} by device", c.units)


def _heat(shares: Shares, axis: Axis, end: float, label: str, units: int) -> str:
    rows, columns = len(shares), len(shares[0])
    xs = axis.scale([0.0, end], LEFT, WIDTH - RIGHT, snug=True)
    y = Axis("unit", whole=True)
    ys = y.scale([0.0, float(units)], HEIGHT - BOTTOM, TOP, snug=True)
    width, height = (WIDTH - RIGHT - LEFT) / columns, (HEIGHT - BOTTOM - TOP) / rows
    shades: list[list[str]] = [[] for _ in range(SHADES + 1)]
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            at = f"M{LEFT + j * width:.2f} {HEIGHT - BOTTOM - (i + 1) * height:.2f}"
            shades[round(min(1.0, share) * SHADES)].append(f"{at}h{width:.2f}v{height:.2f}h-{width:.2f}z")
    cells = [
        f'<path class="bar {hue(0)}" fill-opacity="{shade / SHADES:g}" d="{"".join(found)}"/>'
        for shade, found in enumerate(shades)
        if shade and found
    ]
    return svg([*cells, *frame(axis, y, xs, ys, HEIGHT), *_key()], HEIGHT, label)


def _key() -> list[str]:
    """What the shades mean."""
    parts, x = [], WIDTH - RIGHT - 130
    for shade in range(1, SHADES + 1):
        at = f"M{x + 28 + 7 * shade:.1f} 6h7v9h-7z"
        parts.append(f'<path class="bar {hue(0)}" fill-opacity="{shade / SHADES:g}" d="{at}"/>')
    return [text(x + 24, 14, "0 %", "tick end"), *parts, text(x + 95, 14, "100 %", "tick")]


def _evenness(c: Coverage) -> str:
    total = sum(c.updates)
    shares = [sum(row) / max(1, size * total) for row, size in zip(c.trained, c.row_units, strict=True)]
    return (
        f"Of {count_text(total)} updates the rarest units were in {percent_text(min(shares))}, "
        f"the most frequent in {percent_text(max(shares))}."
    )
