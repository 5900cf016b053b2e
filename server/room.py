"""Whether there is room for what devices send, as far as the last of it has shown: for operators.

Small things may find room where large ones do not. So only what is as large as what was refused says that
there is room again; or a look at the disk, where such a look has found none before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from anabranch.core.clock import Seconds
from anabranch.core.errors import StoreError, StoreFull

log = logging.getLogger(__name__)


class Room:
    """Hears of all that is refused for want of room, and of what is taken. For the event loop's thread.

    `free_bytes`: what may still be written, as far as a look tells, of which any thread may hear.
    """

    free_bytes: Callable[[], int] | None = None

    def __init__(self, monotonic: Seconds = time.monotonic) -> None:
        self._monotonic = monotonic
        self._error, self._at, self._size_bytes = "", 0.0, 0
        self._is_seen = False  # a look tells of it as well, and so of its end

    @property
    def lack(self) -> str:
        """What was refused last for want of room, and how long ago; empty where there is room."""
        if not self._error:
            return ""
        if not self._has_free():
            self._is_seen = True
        elif self._is_seen:
            return ""
        return f"{self._error} ({self._monotonic() - self._at:.0f} s ago)"

    def lacks(self, error: StoreFull, size_bytes: int = 0) -> None:
        """So much found none."""
        if not self._error:
            log.warning("the disk is full, and devices are refused until there is room: %s", error)
        self._error, self._at = str(error), self._monotonic()
        self._size_bytes = max(self._size_bytes, size_bytes)
        self._is_seen = not self._has_free()

    def took(self, size_bytes: int = 0) -> None:
        """So much is durable."""
        if self._error and size_bytes >= self._size_bytes:
            log.info("there is room on the disk again: devices are served")
            self._error, self._size_bytes = "", 0

    def _has_free(self) -> bool:
        try:
            return self.free_bytes is None or self.free_bytes() > 0
        except StoreError:  # it cannot be looked at now
            return True
