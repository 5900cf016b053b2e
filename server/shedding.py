"""What the log says of calls that are sent away: a line at once, and others after pauses that double."""

from __future__ import annotations

import logging
import time
from collections import Counter

from anabranch.core.clock import Seconds
from anabranch.host.standstill import Lasting
from anabranch.reports.text import duration_text

log = logging.getLogger(__name__)

SAY_AGAIN_S = 60.0  # and for so long no call is sent away before it is over


class Shedding:
    """Of one run's calls, or of all of a server of jobs. For the event loop's thread."""

    def __init__(self, monotonic: Seconds = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lasting, self._calls = Lasting(SAY_AGAIN_S), Counter[str]()

    def heard(self, method: str, why: str) -> None:
        """One more call was sent away."""
        lasted_s = self._lasting.heard(self._monotonic())
        if lasted_s == 0.0:
            self._calls.clear()
            log.warning("calls are sent away, to come again: %s: %s", method, why)
        self._calls[method] += 1
        if lasted_s:
            calls = ", ".join(f"{name} {count:,}" for name, count in self._calls.most_common())
            said = duration_text(lasted_s), calls, method, why
            log.warning("calls are sent away, for %s by now (%s); the newest: %s: %s", *said)
