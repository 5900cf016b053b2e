"""The fleet: every device with its figures, filtered, sorted and cut to a screen; and one device."""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.cockpit.asking import Asked, known_device
from anabranch.core.model.arrays import Array
from anabranch.reports.picture.columns import plain
from anabranch.reports.picture.devices import NEVER, STATES
from anabranch.reports.picture.picture import Picture
from anabranch.reports.picture.threads import NONE, VERDICTS

ROWS, ROWS_MAX = 50, 1000
TASKS_MAX = 200
SORTS = (
    *("client", "state", "updates", "rejected", "staleness", "up", "down", "seen", "behind", "examples"),
    *("speed", "flaws", "width"),
)


def fleet(picture: Picture, asked: Asked, silence_s: float | None) -> dict[str, Any]:
    """The rows that are asked for. A device that is silent for `silence_s` is offline; None: never."""
    devices = picture.devices
    states = devices.states(picture.clock_s, silence_s)
    rows = devices.by_name()
    if state := asked.choice("state", ("", *STATES), ""):
        rows = rows[states[rows] == STATES.index(state)]
    if text := asked.text("filter"):
        rows = devices.named(rows, text)
    offset = asked.whole("offset", 0, 0, 10**9)
    limit = asked.whole("limit", ROWS, 1, ROWS_MAX)
    sort = asked.choice("sort", SORTS, "client")
    falling = asked.choice("order", ("asc", "desc"), "asc") == "desc"
    shown = _sorted(picture, rows, states, (sort, falling), offset + limit)[offset:]
    counts = np.bincount(states, minlength=len(STATES)).tolist()
    return {
        "total": len(devices),
        "matching": len(rows),
        "parts": picture.parts_told,
        "states": dict(zip(STATES, counts, strict=True)),
        "rows": device_rows(picture, shown, states),
    }


def _sorted(picture: Picture, rows: Array, states: Array, order: tuple[str, bool], count: int) -> Array:
    """The first so many rows in order; those that have no such figure come last, equal ones by name.

    `order`: a column, and whether it falls.
    """
    sort, falling = order
    if sort == "client":
        return (rows[::-1] if falling else rows)[:count]
    keys = _figures(picture, rows, states, sort).astype(np.float64)
    keys = np.where(np.isnan(keys), np.inf, -keys if falling else keys)
    if count >= len(rows):
        return rows[np.argsort(keys, kind="stable")]
    # Only what is shown is sorted: of what is equal to the last one those of the first names come in.
    last = np.partition(keys, count - 1)[count - 1]
    before = np.flatnonzero(keys < last)
    before = before[np.argsort(keys[before], kind="stable")]
    shown: Array = rows[np.concatenate([before, np.flatnonzero(keys == last)[: count - len(before)]])]
    return shown


def _figures(picture: Picture, rows: Array, states: Array, name: str) -> Array:
    """A figure of each of the rows, NaN where it is not known."""
    devices = picture.devices
    columns = devices.columns
    match name:
        case "state":
            return states[rows]
        case "staleness":
            judged = columns["judged"][rows]
            return np.where(judged > 0, columns["staleness_sum"][rows] / np.maximum(judged, 1), np.nan)
        case "behind":
            base = columns["base"][rows]
            return np.where(base == NEVER, np.nan, np.maximum(picture.version - base, 0))
        case "flaws":
            flaws = np.zeros(len(devices))
            flaws[list(devices.flaws)] = [sum(counts) for counts in devices.flaws.values()]
            return flaws[rows]
        case _:
            found: Array = columns[name][rows]
            return found


def device_rows(picture: Picture, rows: Array, states: Array) -> list[dict[str, Any]]:
    """Rows as the page has them."""
    devices = picture.devices
    figures = {
        "state": [STATES[state] for state in states[rows].tolist()],
        **{name: plain(devices.columns[name][rows]) for name in ("updates", "rejected", "examples", "up")},
        "down": plain(devices.columns["down"][rows]) if picture.fetches_told else [None] * len(rows),
        "staleness": plain(_figures(picture, rows, states, "staleness")),
        "seen_s": plain(devices.columns["seen"][rows]),
        "behind": plain(_figures(picture, rows, states, "behind")),
        "speed_s": plain(_figures(picture, rows, states, "speed")),
        "heard": plain(devices.heard(rows)),
        "width": plain(devices.columns["width"][rows]) if picture.parts_told else [None] * len(rows),
    }
    found = []
    for at, row in enumerate(rows.tolist()):
        flaws, shortened = devices.flaws.get(row, (0, 0))
        own = {"client": devices.names[row], **{name: values[at] for name, values in figures.items()}}
        why = devices.quarantined.get(row, ("", None))[0]
        found.append({**own, "flaws": flaws, "shortened": shortened, "quarantined": why})
    return found


def device(picture: Picture, client: str, silence_s: float | None) -> dict[str, Any]:
    """One device: its row, its newest tasks, what it says of its training. Raises `ConfigError`."""
    devices, threads = picture.devices, picture.threads
    row = known_device(devices.find(client), client)
    states = devices.states(picture.clock_s, silence_s)
    (own,) = device_rows(picture, np.array([row]), states)
    its = np.flatnonzero(threads.columns["device"] == row)
    return {
        **own,
        "tasks": [_task(picture, int(thread)) for thread in its[-TASKS_MAX:][::-1]],
        "tasks_of": len(its),
        "metrics": {name: _measured(picture, its, column) for name, column in threads.metrics.items()},
        "lease_until_s": devices.lease_until.get(row) if own["state"] == "training" else None,
        "run_twice": row in devices.run_twice,
    }


def _task(picture: Picture, thread: int) -> dict[str, Any]:
    threads = picture.threads

    def cell(column: str) -> Any:
        return plain(threads.columns[column][[thread]])[0]

    version, staleness = cell("version"), cell("staleness")
    return {
        "task": threads.tasks[thread],
        "base": cell("base"),
        "granted_s": cell("left"),
        "ended_s": cell("joined"),
        "version": None if version == NONE else version,
        "verdict": VERDICTS[cell("verdict")],
        "reason": threads.reasons[cell("reason")],
        "staleness": None if staleness == NONE else staleness,
        "weight": cell("weight"),
        "up": cell("up"),
        "raw": cell("raw"),
        "down": cell("down") if picture.fetches_told else None,
    }


def _measured(picture: Picture, its: Array, column: str) -> dict[str, Any]:
    """A metric of a device's training, by the versions that its tasks began with."""
    columns = picture.threads.columns
    values = columns[column][its]
    known = np.isfinite(values)
    return {"version": plain(columns["base"][its][known]), "value": plain(values[known])}
