"""The virtual clock: what happens next, and what time it is then."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    """A queue of actions by time, in seconds since the run's start; equal times keep the order of entry.

    Many of a fleet do the same at one moment: the heap is of the moments, and each has a list.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.beside: Action = _nothing  # done after every action
        self._moments: list[float] = []
        self._coming: dict[float, list[Action]] = {}  # by moment
        self._due: deque[Action] = deque()  # of the moment in hand
        self._stopped = False

    def at(self, time_s: float, action: Action) -> None:
        """Do this at that time, which must not be past."""
        coming = self._coming.get(time_s)
        if coming is None:
            self._coming[time_s] = [action]
            heapq.heappush(self._moments, time_s)
        else:
            coming.append(action)

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
        return bool(self._due or self._moments)

    def clear(self) -> None:
        """Forget what was to come. Actions hold their devices, and these the clock: only this frees them."""
        for held in (self._moments, self._coming, self._due):
            held.clear()
        self.beside = _nothing

    def run(self, until_s: float = math.inf) -> None:
        """Take actions in order, until the queue is empty, somebody calls `stop`, or the time is up.

        An action at `until_s` still happens; then the clock shows `until_s`.
        """
        moments, due = self._moments, self._due
        while (due or moments) and not self._stopped:
            if not due:
                if moments[0] > until_s:
                    self.now = until_s
                    return
                self.now = heapq.heappop(moments)
                due.extend(self._coming.pop(self.now))
            self.events += 1
            due.popleft()()
            self.beside()


def _nothing() -> None: ...
