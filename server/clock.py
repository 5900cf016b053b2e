"""The wall clock of a run: it never goes backwards, not across a restart either."""

from __future__ import annotations

import time


class WallClock:
    """Seconds since 1970, at least `after` and at least what was given before."""

    def __init__(self, after: float = 0.0) -> None:
        self._last = after

    def now(self) -> float:
        """The time, or the last one given where the machine's clock was set back."""
        self._last = max(self._last, time.time())
        return self._last
