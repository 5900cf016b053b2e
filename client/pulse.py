"""Heartbeats while the main thread trains: one thread and one moment to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable

JOIN_S = 2.0
LOOK_S = 3600.0  # the longest that a thread rests: a moment may be further than it can


class Pulse:
    """Calls `beat` in a thread of its own when the moment that was set has come."""

    def __init__(self, beat: Callable[[], None], clock: Callable[[], float]) -> None:
        self._beat, self._clock = beat, clock
        self._changed = threading.Condition()
        self._at: float | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="anabranch-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to wait."""
        self._thread.start()

    def set(self, at: float) -> None:
        """Beat at this moment; it replaces an earlier one."""
        with self._changed:
            self._at = at
            self._changed.notify()

    def stop(self) -> None:
        """No more beats; a call that is under way is not waited for long."""
        with self._changed:
            self._over = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while self._wait():
            self._beat()

    def _wait(self) -> bool:
        """True when the moment has come, False at the end."""
        with self._changed:
            while not self._over:
                left_s = None if self._at is None else self._at - self._clock()
                if left_s is not None and left_s <= 0:
                    self._at = None
                    return True
                self._changed.wait(None if left_s is None else min(left_s, LOOK_S))
            return False
