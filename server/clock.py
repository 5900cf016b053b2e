"""The clock of a run that is served, and what its log says of the machine's."""

from __future__ import annotations

import logging
import time

from anabranch.core.clock import EventClock, Seconds
from anabranch.identity.certificates import time_text
from anabranch.reports.text import duration_text

log = logging.getLogger(__name__)


def run_clock(last: float, wall: Seconds) -> EventClock:
    """The time of a run whose newest event was at `last`. `wall`: the machine's clock, seconds since 1970."""

    def stepped(by_s: float) -> None:
        way = "forward" if by_s > 0 else "back"
        _warn(f"this machine's clock was set {way} by {duration_text(abs(by_s))}", wall(), by_s)

    clock = EventClock(last, wall, time.monotonic, stepped)
    if (by_s := clock.behind_s) > 0:
        _warn(f"this machine's clock is {duration_text(by_s)} behind the run", wall(), -by_s)
    return clock


def _warn(what: str, shown: float, by_s: float) -> None:
    log.warning(
        "%s, it is %s by it: leases and timers do not go by it, certificates do",
        what,
        time_text(shown),
        extra={"fields": {"seconds": round(by_s, 3), "clock_s": shown}},
    )
