"""Says that a server is waited for: at once, and again after pauses that double."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from anabranch.core.errors import AnabranchError

log = logging.getLogger(__name__)

FIRST_S, LONGEST_S = 2.0, 60.0


class WaitingNotice:
    """Hears of calls that failed and are tried again. `whom` is waited for; `now` is a clock of seconds."""

    def __init__(self, whom: str, now: Callable[[], float] = time.monotonic) -> None:
        self._whom, self._now = whom, now
        self._pause_s, self._due = FIRST_S, now()
        self._since: float | None = None

    def failed(self, error: AnabranchError) -> None:
        """A call has failed."""
        now = self._now()
        if self._since is None:
            self._since = now
        if now < self._due:
            return
        seconds = round(now - self._since)
        for_s = f", for {seconds} s so far" if seconds else ""
        fields = {"address": self._whom, "seconds": seconds, "error": type(error).__name__}
        why = str(error).removeprefix(f"{self._whom}: ")
        log.warning("waiting for %s%s: %s", self._whom, for_s, why, extra={"fields": fields})
        self._due, self._pause_s = now + self._pause_s, min(2.0 * self._pause_s, LONGEST_S)

    def answered(self) -> None:
        """It is there: the next failure is another one."""
        if self._since is not None:
            seconds = round(self._now() - self._since)
            fields = {"address": self._whom, "seconds": seconds}
            log.info("%s answers", self._whom, extra={"fields": fields})
        self._since, self._pause_s, self._due = None, FIRST_S, self._now()
