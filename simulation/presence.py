"""When a simulated device is there: on, not gone, neither away nor down.

It is on in a part of every `fleet.availability_period_s`, from a phase of its own, or as its trace says.

| symbol | meaning                                                                              |
|--------|--------------------------------------------------------------------------------------|
| a, s   | `fleet.availability`, `fleet.availability_swing`                                     |
| D      | `fleet.availability_day_s`                                                           |
| p_i    | the device's peak: `availability_peak_s` + `availability_zones` D u_i, u_i uniform   |

The part of a period that begins at t is a (1 + s cos(2 pi (t - p_i) / D)): a in the mean of a day. (Fleets
of phones have such days: Bonawitz et al., Towards federated learning at scale, 2019. The cosine is ours.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import partial

from anabranch.core.config.tables import FleetTable
from anabranch.simulation.clock import VirtualClock
from anabranch.workloads.traces import DeviceMoment, DeviceTrace


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
    def _meet(self, moment: DeviceMoment) -> None:
        """Its link is that from now on."""

    @property
    @abstractmethod
    def _trace(self) -> DeviceTrace | None:
        """What was written down of it."""

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
        if fleet.leavers and self._draw("leaver", 0) < fleet.leavers:
            self._clock.at(max(now, self._horizon_s * self._draw("leaver-moment", 0)), self.leave)
        if (trace := self._trace) is not None:
            self._follow(trace, *trace.at(now))
            return
        if fleet.availability >= 1.0:
            self._set(_on=True)
            return
        phase_s = fleet.availability_period_s * self._draw("availability", 0)
        on_s = fleet.availability_period_s * self._part_on(now - phase_s)
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
        off_s = start_s + fleet.availability_period_s * self._part_on(start_s)
        next_s = start_s + fleet.availability_period_s
        if start_s >= clock.now:
            self._set(_on=True)
        if off_s > clock.now:
            clock.at(off_s, partial(self._set, _on=False))
        clock.at(next_s, partial(self._cycle, next_s))

    def _part_on(self, start_s: float) -> float:
        """Which part of the period that begins then it is on."""
        fleet = self._fleet
        if not fleet.availability_swing:
            return fleet.availability
        zone_s = fleet.availability_zones * fleet.availability_day_s * self._draw("availability-zone", 0)
        days = (start_s - fleet.availability_peak_s - zone_s) / fleet.availability_day_s
        return fleet.availability * (1.0 + fleet.availability_swing * math.cos(2.0 * math.pi * days))

    def _follow(self, trace: DeviceTrace, turn: int, number: int) -> None:
        """A moment of its trace; then the next."""
        moment = trace.moments[number]
        self._meet(moment)
        self._set(_on=moment.on)
        if (coming := trace.after(turn, number)) is not None:
            at_s, *which = coming
            self._clock.at(at_s, partial(self._follow, trace, *which))

    def _set(self, **flags: bool) -> None:
        before = self.is_there
        for name, value in flags.items():
            setattr(self, name, value)
        if self.is_there and not before:
            self._come()
        elif before and not self.is_there:
            self._vanish()
