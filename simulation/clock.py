"""The virtual clock: what happens next, and what time it is then."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    """A queue of actions by time, in seconds since the run's start; equal times keep the order of entry."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.beside: Action = _nothing  # done after every action
        self._queue: list[tuple[float, int, Action]] = []
        self._entered = 0
        self._stopped = False

    def at(self, time_s: float, action: Action) -> None:
        """Do this at that time, which must not be past."""
        self._entered += 1
        heapq.heappush(self._queue, (time_s, self._entered, action))

    def stop(self) -> None:
        """End `run` after the action in hand."""
        self._stopped = True

    @property
    def is_stopped(self) -> bool:
        """Whether the action in hand is the last."""
        return self._stopped

    @property
    def has_more(self) -> bool:
        """Whether anything is to come after the action in hand."""
        return bool(self._queue)

    def clear(self) -> None:
        """Forget what was to come. Actions hold their devices, and these the clock: only this frees them."""
        self._queue.clear()
        self.beside = _nothing

    def run(self, until_s: float = math.inf) -> None:
        """Take actions in order, until the queue is empty, somebody calls `stop`, or the time is up.

        An action at `until_s` still happens; then the clock shows `until_s`.
        """
        queue = self._queue
        while queue and not self._stopped:
            if queue[0][0] > until_s:
                self.now = until_s
                return
            self.now, _, action = heapq.heappop(queue)
            self.events += 1
            action()
            self.beside()


def _nothing() -> None: ...
