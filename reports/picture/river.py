"""The river: versions along time, and each task a thread that leaves them and comes back."""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.core.model.arrays import Array
from anabranch.reports.picture.columns import plain
from anabranch.reports.picture.picture import Picture
from anabranch.reports.picture.threads import NONE, VERDICTS

VERSIONS_MAX = 4000
BINS = 240  # of the rate of updates
LOT = np.uint64(2654435761)  # Knuth's: spreads the numbers of rows evenly


def river(picture: Picture, lanes: Array, start: float, end: float, limit: int) -> dict[str, Any]:
    """The threads of some devices (`lanes` are their rows) between two moments, at most `limit` of them."""
    rows = _within(picture, lanes, start, end)
    thin = len(rows) > limit
    if thin:
        lots = (rows.astype(np.uint64) * LOT) % np.uint64(1 << 32)
        rows = np.sort(rows[np.argsort(lots, kind="stable")[:limit]])
    columns, versions = picture.threads.columns, picture.versions
    shown = _versions(versions["time"], start, end)
    judged = picture.steps["staleness"]
    return {
        "from_s": picture.from_s,
        "window": [start, end],
        "versions": [
            list(v)
            for v in zip(plain(versions["version"][shown]), plain(versions["time"][shown]), strict=True)
        ],
        "lanes": [picture.devices.names[row] for row in lanes],
        "lanes_of": len(picture.devices),
        "threads": _threads(columns, rows, lanes),
        "staleness_max": int(judged.max()) if len(judged) else 0,
        "thinned": bool(thin or len(shown) < _count(versions["time"], start, end)),
        "rates": _rates(picture.steps["time"], start, end),
    }


def _within(picture: Picture, lanes: Array, start: float, end: float) -> Array:
    """The tasks of these devices that were under way between two moments."""
    columns = picture.threads.columns
    left, joined = columns["left"], columns["joined"]
    wanted = (left <= end) & ((joined >= start) | np.isnan(joined))
    if len(lanes) < len(picture.devices):
        of_lane = np.zeros(len(picture.devices), np.bool_)
        of_lane[lanes] = True
        wanted &= of_lane[columns["device"]]
    return np.flatnonzero(wanted)


def _threads(columns: Any, rows: Array, lanes: Array) -> list[list[Any]]:
    order = np.argsort(lanes)
    lane = order[np.searchsorted(lanes[order], columns["device"][rows])] if len(rows) else rows
    verdicts = columns["verdict"][rows]
    version, staleness = columns["version"][rows], columns["staleness"][rows]
    return [
        [a, b, c, None if d == NONE else d, e, None if f == NONE else f, VERDICTS[g], h]
        for a, b, c, d, e, f, g, h in zip(
            plain(lane),
            plain(columns["base"][rows]),
            plain(columns["left"][rows]),
            plain(version),
            plain(columns["joined"][rows]),
            plain(staleness),
            plain(verdicts),
            plain(columns["weight"][rows]),
            strict=True,
        )
    ]


def _count(times: Array, start: float, end: float) -> int:
    return int(np.searchsorted(times, end, side="right") - np.searchsorted(times, start))


def _versions(times: Array, start: float, end: float) -> Array:
    """The versions of a window, evenly thinned, and the one before it."""
    first = max(int(np.searchsorted(times, start)) - 1, 0)
    last = int(np.searchsorted(times, end, side="right"))
    return np.unique(
        np.linspace(first, max(last - 1, first), min(max(last - first, 1), VERSIONS_MAX)).astype(np.int64)
    )


def _rates(times: Array, start: float, end: float) -> list[list[float]]:
    """Updates per second along the window: [the middle of a slot, the rate]."""
    if not end > start:
        return []
    counts, edges = np.histogram(times, BINS, (start, end))
    width = (end - start) / BINS
    return [[float(edge + width / 2), float(n / width)] for edge, n in zip(edges, counts, strict=False)]
