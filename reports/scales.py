"""From quantities to positions on a chart: round ticks, axes with units, linear scales."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from anabranch.reports.text import COUNT, Unit, unit_for

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_NEGLIGIBLE = 1e-12  # no axis resolves less
FARTHEST = 1e300  # what lies beyond is drawn there: the difference of two such is a number still
LOG_LEAST = 2.0  # times that the largest value on a logarithmic axis is the smallest


@dataclass(frozen=True)
class Axis:
    """What an axis shows.

    `whole` keeps the ticks at whole numbers; `from_zero` starts at 0. A `log` axis shows what is
    positive, and the rest at its start; over values that are nearly equal it is linear.
    """

    label: str
    units: tuple[Unit, ...] = COUNT
    from_zero: bool = True
    whole: bool = False
    ticks_about: int = 5
    log: bool = False

    def scale(self, values: Iterable[float], start: float, end: float, snug: bool = False) -> AxisScale:
        """A scale over the values (base units) from pixel `start` to pixel `end`.

        The range ends at a round tick; a `snug` one ends at the largest value.
        """
        known = [_near(v) for v in values] or [0.0, 1.0]
        positive = [v for v in known if v > _NEGLIGIBLE]
        if self.log and positive and max(positive) > LOG_LEAST * min(positive):
            return self._log_scale(positive, start, end)
        low, high = (min(0.0, *known) if self.from_zero else min(known)), max(known)
        unit = unit_for(high, self.units)
        low, high = _widened(low / unit.size, high / unit.size)
        step = _step(high - low, self.ticks_about, self.whole)
        first = math.floor(low / step + 1e-9)
        last = max(math.ceil(high / step - 1e-9), first + 1)
        ticks = [i * step for i in range(first, last + 1)]
        top = ticks[-1]
        if snug and high > ticks[0]:
            ticks, top = [t for t in ticks if t <= high + 1e-9 * step], high
        return AxisScale(unit, tuple(ticks), step, (ticks[0], top), (start, end))

    def _log_scale(self, known: list[float], start: float, end: float) -> AxisScale:
        """From a power of ten, or twice or five times one, to the largest value."""
        unit = unit_for(max(known), self.units)
        low, high = min(known) / unit.size, max(known) / unit.size
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) + 1e-9)
        fine = [m * 10.0**power for power in range(first, last + 1) for m in (1, 2, 5)]
        low = max(t for t in fine if t <= low * (1 + 1e-9))
        within = [t for t in fine if low <= t <= high * (1 + 1e-9)]
        powers = [t for t in within if math.log10(t).is_integer()]
        ticks = within if len(within) <= self.ticks_about + 1 else powers
        return AxisScale(unit, tuple(ticks), ticks[0], (low, high), (start, end), log=True)

    def title(self, unit: Unit) -> str:
        """`uplink + downlink (MB)`."""
        return f"{self.label} ({unit.name})" if unit.name else self.label


@dataclass(frozen=True)
class AxisScale:
    """A map from base units to pixels, linear or logarithmic. `ticks`, `step` and `domain` are in `unit`."""

    unit: Unit
    ticks: tuple[float, ...]
    step: float
    domain: tuple[float, float]
    pixels: tuple[float, float]
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value in base units."""
        (low, high), (start, end) = self.domain, self.pixels
        at = _near(value) / self.unit.size
        if self.log:
            low, at, high = (math.log10(max(x, low)) for x in (low, at, high))
        return start + (at - low) / (high - low) * (end - start)

    def tick_pixel(self, tick: float) -> float:
        """The pixel of a tick."""
        return self(tick * self.unit.size)

    def tick_text(self, tick: float) -> str:
        """The label of a tick, with as many decimals as the step needs."""
        if abs(tick) >= 1e6 or self.step < 1e-5 or self.log:
            return f"{tick:.4g}"
        decimals = 0
        while decimals < 6 and abs(round(self.step, decimals) - self.step) > 1e-9 * self.step:
            decimals += 1
        return f"{tick:,.{decimals}f}"

    def value_text(self, value: float) -> str:
        """A value (base units) in the scale's unit, four digits: `81.25 %`."""
        shown = value / self.unit.size
        digits = f"{shown:,.0f}" if abs(shown) >= 1e4 else f"{shown:.4g}"
        return f"{digits} {self.unit.name}".strip()


def _near(value: float) -> float:
    return max(-FARTHEST, min(value, FARTHEST))


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range with some width, so that one point, or equal ones, can be drawn."""
    largest = max(abs(low), abs(high))
    if high - low > max(1e-6 * largest, _NEGLIGIBLE):
        return low, high
    room = 0.05 * largest if largest > _NEGLIGIBLE else 1.0
    return (low, high + 1.0) if low == 0 else (low - room, high + room)


def _step(span: float, about: int, whole: bool) -> float:
    """The round step that cuts the span into at most `about` pieces."""
    raw = max(span / about, 1.0) if whole else span / about
    power = 10.0 ** math.floor(math.log10(raw))
    steps = (r * power for r in _ROUND if not whole or (r * power).is_integer())
    return next(s for s in steps if s >= raw * (1 - 1e-9))
