"""The river as a page asks for it: of which devices, and between which moments or versions."""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.cockpit.asking import Asked, known_device
from anabranch.core.model.arrays import Array
from anabranch.reports.picture.picture import Picture
from anabranch.reports.picture.river import river

LANES, LANES_MAX = 64, 1000
LIMIT, LIMIT_MAX = 4000, 40_000


def asked_river(picture: Picture, asked: Asked) -> dict[str, Any]:
    """The threads of some devices between two moments, or two versions."""
    start, end = _window(picture, asked)
    return river(picture, _lanes(picture, asked), start, end, asked.whole("limit", LIMIT, 1, LIMIT_MAX))


def _window(picture: Picture, asked: Asked) -> tuple[float, float]:
    """The moments that are asked for."""
    if asked.choice("by", ("time", "version"), "time") == "time":
        return asked.number("from", 0.0), asked.number("to", picture.now_s)
    table = picture.versions
    first = int(np.searchsorted(table["version"], asked.number("from", 0.0)))
    last = int(np.searchsorted(table["version"], asked.number("to", float(picture.version)), side="right"))
    times = table["time"]
    end = float(times[last]) if last < len(times) else picture.now_s
    return float(times[min(first, len(times) - 1)]), end


def _lanes(picture: Picture, asked: Asked) -> Array:
    """The rows of the devices that have a lane each."""
    devices, named = picture.devices, asked.names("clients", LANES_MAX)
    if named:
        return np.array([known_device(devices.find(name), name) for name in named], np.int64)
    return devices.sample(asked.whole("lanes", LANES, 1, LANES_MAX))
