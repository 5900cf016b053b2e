"""What was measured of versions: accuracy, loss, and whatever else the App's `evaluate` returns."""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.reports.result import Point, Result
from anabranch.reports.scales import Axis
from anabranch.reports.text import COUNT, PERCENT, clipped

ACCURACY, LOSS = "accuracy", "loss"
NAME_CHARS_MAX = 24


def value(point: Point, name: str) -> float | None:
    """A figure of a measurement, None where it has none or one that is not finite."""
    return {ACCURACY: point.accuracy, LOSS: point.loss, **point.metrics}.get(name)


def metric_names(runs: Iterable[Result]) -> list[str]:
    """What was measured and finite at least once in any of the runs: accuracy, loss, the App's own."""
    names = {ACCURACY: None, LOSS: None, **{n: None for r in runs for p in r.history for n in p.metrics}}
    points = [p for r in runs for p in r.history]
    return [name for name in names if any(value(p, name) is not None for p in points)]


def lacking(r: Result, name: str) -> int:
    """Measurements without a figure that others of the run have: it was not finite there."""
    missing = sum(value(p, name) is None for p in r.history)
    return missing if missing < len(r.history) else 0


def heading(name: str) -> str:
    """A metric at the beginning of a title; the App's own names stay as they are."""
    return name.capitalize() if name in (ACCURACY, LOSS) else name


def axis_of(name: str) -> Axis:
    """The axis of a metric: an accuracy is a fraction, of the others nothing is known."""
    return Axis(clipped(name, NAME_CHARS_MAX), PERCENT if name == ACCURACY else COUNT, from_zero=False)
