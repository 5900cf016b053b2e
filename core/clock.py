"""The time of events: it goes on whatever is done to the machine's clock.

Leases, flushes, deadlines and rates are differences of it. It begins where the log has ended and grows by
what a monotonic clock says has passed, so a wall clock that is set back freezes nothing, and one that is set
forward ends nothing. The wall clock alone knows how long the server was away; it is believed if that can be.
"""

from __future__ import annotations

from collections.abc import Callable

Seconds = Callable[[], float]
Stepped = Callable[[float], None]

STEP_S = 1.0  # what is less is a clock that is being corrected slowly
READ_S = 0.1  # two clocks that were read further apart than this say nothing of each other
AWAY_S_MAX = 366 * 86400.0  # nobody comes back after longer: the clock is wrong


class EventClock:
    """Seconds since 1970 as far as the wall clock was right when the run began; it never goes back.

    `last`: the time of the newest event. `wall` counts from 1970, `monotonic` from anywhere. `stepped` hears
    by how many seconds the wall clock was set forward, or back (negative), since it was looked at last.
    """

    def __init__(
        self, last: float, wall: Seconds, monotonic: Seconds, stepped: Stepped = lambda _: None
    ) -> None:
        self._wall, self._monotonic, self._stepped = wall, monotonic, stepped
        shown = wall()
        self.behind_s = max(0.0, last - shown)
        self.away_s = shown - last if 0.0 < shown - last <= AWAY_S_MAX else 0.0
        self._began, self._zero = last + self.away_s, monotonic()
        self._ahead_s = shown - self._began

    def now(self) -> float:
        """The time of the next event."""
        before, shown, after = self._monotonic(), self._wall(), self._monotonic()
        now = self._began + (after - self._zero)
        if after - before <= READ_S:
            ahead_s = shown - now
            by_s, self._ahead_s = ahead_s - self._ahead_s, ahead_s
            if abs(by_s) >= STEP_S:
                self._stepped(by_s)
        return now
