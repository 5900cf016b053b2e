"""Whether there is room for what devices send, as far as the last of it has shown: for operators.

Small things may find room where large ones do not. So only what is as large as what was refused says that
there is room again.
"""

from __future__ import annotations

import logging
import time

from anabranch.core.clock import Seconds
from anabranch.core.errors import StoreFull

log = logging.getLogger(__name__)


class Room:
    """Hears of all that is refused for want of room, and of what is taken. For the event loop's thread."""

    def __init__(self, monotonic: Seconds = time.monotonic) -> None:
        self._monotonic = monotonic
        self._error, self._at, self._size_bytes = "", 0.0, 0

    @property
    def lack(self) -> str:
        """What was refused last for want of room, and how long ago; empty where there is room."""
        ago_s = self._monotonic() - self._at
        return f"{self._error} ({ago_s:.0f} s ago)" if self._error else ""

    def lacks(self, error: StoreFull, size_bytes: int = 0) -> None:
        """So much found none."""
        if not self._error:
            log.warning("the disk is full, and devices are refused until there is room: %s", error)
        self._error, self._at = str(error), self._monotonic()
        self._size_bytes = max(self._size_bytes, size_bytes)

    def took(self, size_bytes: int = 0) -> None:
        """So much is durable."""
        if self._error and size_bytes >= self._size_bytes:
            log.info("there is room on the disk again: devices are served")
            self._error, self._size_bytes = "", 0
