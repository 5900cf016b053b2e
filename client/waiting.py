"""Says that a server is waited for, or what holds a device up: at once, then after pauses that double."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from anabranch.core.errors import AnabranchError
from anabranch.core.model.updates import Reason

log = logging.getLogger(__name__)

FIRST_S, LONGEST_S = 2.0, 60.0
HELD_UP = (Reason.ANOTHER_SESSION, Reason.PAUSED, Reason.QUARANTINED)  # refusals that somebody has to end
ANSWERS = ("enrolled", "granted", "fetched", "pushed")  # what a device tells when its server has answered
OWN_DISK = "this device's own disk"


class WaitingNotice:
    """Hears of calls that failed and are tried again. `whom` is waited for; `now` is a clock of seconds."""

    def __init__(self, whom: str, now: Callable[[], float] = time.monotonic) -> None:
        self._whom, self._now = whom, now
        self._for = whom  # since the last failure; else `OWN_DISK`
        self._pause_s, self._due = FIRST_S, now()
        self._since: float | None = None

    def failed(self, error: AnabranchError) -> None:
        """A call has failed."""
        self._failed(type(error).__name__, str(error))

    def hear(self, kind: str, **data: Any) -> None:
        """The same of a device, of which nobody else hears what it does: an `OnEvent`."""
        if kind == "failed" and data.get("again", True):
            self._failed(data["error"], data["detail"], data.get("own_disk", False))
        elif kind == "refused" and data["reason"] in HELD_UP:
            self._failed(data["reason"], data["detail"])
        elif kind == "pushed" or (kind in ANSWERS and self._for != OWN_DISK):
            self.answered()

    def _failed(self, error: str, text: str, own_disk: bool = False) -> None:
        now, waited_for = self._now(), OWN_DISK if own_disk else self._whom
        if self._since is None or waited_for != self._for:
            self._for, self._since, self._pause_s, self._due = waited_for, now, FIRST_S, now
        if now < self._due:
            return
        seconds = round(now - self._since)
        for_s = f", for {seconds} s so far" if seconds else ""
        fields = {"address": self._whom, "seconds": seconds, "error": error}
        why = text.removeprefix(f"{self._whom}: ")
        log.warning("waiting for %s%s: %s", waited_for, for_s, why, extra={"fields": fields})
        self._due, self._pause_s = now + self._pause_s, min(2.0 * self._pause_s, LONGEST_S)

    def answered(self) -> None:
        """It is there: the next failure is another one."""
        if self._since is not None:
            seconds = round(self._now() - self._since)
            fields = {"address": self._whom, "seconds": seconds}
            does = "takes results" if self._for == OWN_DISK else "answers"
            log.info("%s %s", self._for, does, extra={"fields": fields})
        self._since, self._pause_s, self._due = None, FIRST_S, self._now()
