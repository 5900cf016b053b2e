"""The time of a simulated server's events: the virtual one, or what its own clocks make of it.

Where `[faults]` set the machine's clock, that clock is a wall clock like any other: it says nothing of how
much time has passed. So events have the time of `core.clock.EventClock`, as on a live server, and it begins
anew with every start of the server.
"""

from __future__ import annotations

from bisect import bisect_right

from anabranch.core.clock import EventClock
from anabranch.simulation.clock import VirtualClock

LEAST_S = 1e-6  # of a wait: no float is so coarse that it would end at the same moment


class ServerTime:
    """The virtual time itself."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def now(self) -> float:
        """The time of the next event."""
        return self._clock.now

    def moment(self, due: float) -> float:
        """When, by the virtual clock, it will be so late; now if it is already."""
        return max(due, self._clock.now)

    def true(self, at: float) -> float:
        """When, by the virtual clock, it was so late to the server."""
        return at

    def restart(self, last: float) -> None:
        """The server starts again; its newest event was at `last`."""


class SteppedTime(ServerTime):
    """Of a machine whose clock is set now and then. `steps`: how often the server has seen that."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.steps = 0
        self._ahead_s = 0.0
        self._starts: list[tuple[float, float]] = []  # event time and virtual time at each
        self.restart(0.0)

    def step(self, by_s: float) -> None:
        """Somebody sets the clock, forward or back."""
        self._ahead_s += by_s

    def now(self) -> float:
        """See `ServerTime`."""
        return self._time.now()

    def moment(self, due: float) -> float:
        """See `ServerTime`."""
        left_s = due - self.now()
        return self._clock.now + (max(left_s, LEAST_S) if left_s > 0.0 else 0.0)

    def restart(self, last: float) -> None:
        """See `ServerTime`."""
        self._time = EventClock(last, self._wall, lambda: self._clock.now, self._stepped)
        self._starts.append((self._time.now(), self._clock.now))

    def true(self, at: float) -> float:
        """See `ServerTime`."""
        later = bisect_right(self._starts, at, key=lambda start: start[0])
        began, began_at_s = self._starts[max(0, later - 1)]
        return began_at_s + (at - began)

    def _wall(self) -> float:
        return self._clock.now + self._ahead_s

    def _stepped(self, _: float) -> None:
        self.steps += 1
