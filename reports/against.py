"""What a metric is drawn against: time, updates or traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from anabranch.reports.page import TRAFFIC, UPDATES, time_axis
from anabranch.reports.result import Kind, Point
from anabranch.reports.scales import Axis

Against = Literal["time", "updates", "bytes"]
AT: Mapping[Against, Callable[[Point], float]] = {
    "time": lambda p: p.time_s,
    "updates": lambda p: p.updates,
    "bytes": lambda p: p.uplink_bytes + p.downlink_bytes,
}
TITLES: Mapping[Against, str] = {"time": "time", "updates": "updates", "bytes": "traffic"}


def axis(against: Against, kind: Kind) -> Axis:
    """The x axis, of a run of this kind."""
    return {"time": time_axis(kind), "updates": UPDATES, "bytes": TRAFFIC}[against]


def ways(names: Sequence[str]) -> list[tuple[str, Against]]:
    """The charts of a page of one metric or more: the first against everything, the others against time."""
    return [*((names[0], against) for against in AT), *((name, "time") for name in names[1:])]
