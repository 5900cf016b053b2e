"""When a simulated device is there: on, not gone, neither away nor down."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

from anabranch.core.config.tables import FleetTable
from anabranch.simulation.clock import VirtualClock


class DevicePresence(ABC):
    """Base of a device: `_come` and `_vanish` are called as it comes and goes.

    `horizon_s`: devices leave for good before this.
    """

    __slots__ = ("_away", "_clock", "_fleet", "_horizon_s", "_on", "has_left", "is_down")

    def __init__(self, clock: VirtualClock, fleet: FleetTable, horizon_s: float) -> None:
        self._clock, self._fleet, self._horizon_s = clock, fleet, horizon_s
        self._on = self._away = self.has_left = self.is_down = False

    @abstractmethod
    def _come(self) -> None:
        """It is there from now on."""

    @abstractmethod
    def _vanish(self) -> None:
        """It is not there any more."""

    @abstractmethod
    def _draw(self, purpose: str, number: int) -> float:
        """A uniform number in [0, 1) of its own."""

    @property
    def is_there(self) -> bool:
        """Whether it runs and can be reached."""
        return self._on and not (self._away or self.has_left or self.is_down)

    def begin(self) -> None:
        """From now on: in the middle of an on or off period if the fleet has them."""
        fleet, now = self._fleet, self._clock.now
        if self._draw("leaver", 0) < fleet.leavers:
            self._clock.at(max(now, self._horizon_s * self._draw("leaver-moment", 0)), self.leave)
        if fleet.availability >= 1.0:
            self._set(_on=True)
            return
        phase_s = fleet.availability_period_s * self._draw("availability", 0)
        on_s = fleet.availability_period_s * fleet.availability
        self._cycle(now - phase_s)
        if phase_s < on_s:
            self._set(_on=True)

    def leave(self) -> None:
        """Go for good."""
        self._set(has_left=True)

    def _be_away(self, away_s: float) -> None:
        """Vanish, and be back after so many seconds."""
        self._set(_away=True)
        self._clock.at(self._clock.now + away_s, partial(self._set, _away=False))

    def _be_down(self, down_s: float) -> None:
        """The same, after a crash."""
        self._set(is_down=True)
        self._clock.at(self._clock.now + down_s, partial(self._set, is_down=False))

    def _cycle(self, start_s: float) -> None:
        """One period from `start_s`, of which a part may be over; then the next."""
        fleet, clock = self._fleet, self._clock
        off_s = start_s + fleet.availability_period_s * fleet.availability
        next_s = start_s + fleet.availability_period_s
        if start_s >= clock.now:
            self._set(_on=True)
        if off_s > clock.now:
            clock.at(off_s, partial(self._set, _on=False))
        clock.at(next_s, partial(self._cycle, next_s))

    def _set(self, **flags: bool) -> None:
        before = self.is_there
        for name, value in flags.items():
            setattr(self, name, value)
        if self.is_there and not before:
            self._come()
        elif before and not self.is_there:
            self._vanish()
