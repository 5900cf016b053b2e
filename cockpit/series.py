"""Series for charts: what was counted and measured along a run, thinned so that no peak is lost."""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.cockpit.asking import Asked
from anabranch.core.model.arrays import Array
from anabranch.reports.picture.columns import plain
from anabranch.reports.picture.picture import Picture

POINTS, POINTS_MAX = 2000, 20_000
METRICS_WHOLE, METRIC_POINTS_LEAST = 4, 100  # more metrics than these share the points of so many


def thinned(values: Array, points: int) -> Array:
    """Which of the rows to show: all, or the first, the last, and the least and the greatest of buckets."""
    rows = len(values)
    if rows <= points:
        return np.arange(rows)
    edges = np.linspace(0, rows, max(points // 2, 1), dtype=np.int64)[:-1]
    buckets = np.repeat(np.arange(len(edges)), np.diff([*edges, rows]))
    order = np.lexsort((np.nan_to_num(values, nan=-np.inf), buckets))
    last = np.append(edges[1:], rows) - 1
    return np.unique(np.concatenate(([0, rows - 1], order[edges], order[last])))


def series(picture: Picture, asked: Asked) -> dict[str, Any]:
    """The columns of the learning page."""
    points = asked.whole("points", POINTS, 4, POINTS_MAX)
    least, most = asked.number("from", -np.inf), asked.number("to", np.inf)
    steps = picture.steps
    first, end = np.searchsorted(steps["time"], [least, np.nextafter(most, np.inf)])
    rows = first + thinned(steps["staleness"][first:end], points)
    columns = ("time", "version", "updates", "up", "down", "staleness")
    found: dict[str, Any] = {name: plain(steps[name][rows]) for name in columns}
    found["down"] = down(picture, rows)
    names = picture.measured.names
    shared = max(points * METRICS_WHOLE // max(len(names), METRICS_WHOLE), min(points, METRIC_POINTS_LEAST))
    return {**found, "metrics": {name: _metric(picture, name, shared, least, most) for name in names}}


def down(picture: Picture, rows: Array) -> list[int | None]:
    """The bytes down of these steps, null where they are not known."""
    steps = picture.steps
    known = steps["time"][rows] > picture.down_from_s
    return [size if told else None for size, told in zip(steps["down"][rows].tolist(), known, strict=True)]


def _metric(picture: Picture, name: str, points: int, least: float, most: float) -> dict[str, Any]:
    """A metric of the versions, each dated by its publication."""
    at, values = picture.measured.of(name)
    table = picture.versions
    rows = np.searchsorted(table["version"], at)
    rows = np.minimum(rows, len(table) - 1)
    times = table["time"][rows]
    within = (times >= least) & (times <= most)
    at, values, rows, times = at[within], values[within], rows[within], times[within]
    shown = thinned(values, points)
    rows = rows[shown]
    return {
        "time": plain(times[shown]),
        "version": plain(at[shown]),
        "updates": plain(table["updates"][rows]),
        "bytes": plain((table["up"] + table["down"])[rows]),
        "value": plain(values[shown]),
    }
