"""The session's timers, in the thread of the agent."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.client.stopping import Bell
from anabranch.core import effects as ef

LOOK_AROUND_S = 3600.0  # without a timer the bell ends the rest
RETRY = "retry"


class Timers:
    """One moment for each name. `waiting` hears how long there is to rest."""

    def __init__(self, bell: Bell, waiting: Callable[[float], None]) -> None:
        self._bell, self._waiting = bell, waiting
        self._moments: dict[str, float] = {}
        self._hastened = False

    def __len__(self) -> int:
        return len(self._moments)

    def set(self, timer: ef.SetTimer) -> None:
        """Replace the timer of this name."""
        self._hastened = False
        self._moments[timer.name] = timer.at

    def hasten(self) -> None:
        """From any thread: a call that was put off need not wait any longer."""
        self._hastened = True
        self._bell.ring()

    def due(self) -> str | None:
        """Rest until the next timer is due and return its name. Woken before, None: look around."""
        if not self._moments:
            self._bell.rest(LOOK_AROUND_S)
            return None
        if self._hastened and RETRY in self._moments:
            self._moments[RETRY] = self._bell.now()
        name, at = min(self._moments.items(), key=lambda item: item[1])
        left_s = at - self._bell.now()
        if left_s > 0:
            self._waiting(left_s)
            self._bell.rest(left_s)
            return None
        del self._moments[name]
        return name
