"""The session's timers, in the thread of the agent."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.client.stopping import Bell
from anabranch.core import effects as ef

LOOK_AROUND_S = 3600.0  # without a timer the bell ends the rest
RETRY = "retry"


class Reachability:
    """Whether a thread's last call found nobody, and a server is back since: then it waits no longer.

    The news may come before the thread has heard that its call has failed, let alone set a timer.
    """

    def __init__(self) -> None:
        self._nobody = self._returned = False

    def begin(self) -> None:
        """A call is made: what is heard from now on is about it."""
        self._nobody = self._returned = False

    def nobody(self) -> None:
        """It was not answered."""
        self._nobody = True

    def returned(self) -> None:
        """From any thread: a server can be reached again."""
        self._returned = True

    @property
    def is_back(self) -> bool:
        """What was put off as nobody answered is due."""
        return self._nobody and self._returned


class Timers:
    """One moment for each name. `waiting` hears how long there is to rest."""

    def __init__(self, bell: Bell, waiting: Callable[[float], None], reach: Reachability) -> None:
        self._bell, self._waiting, self._reach = bell, waiting, reach
        self._moments: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._moments)

    def set(self, timer: ef.SetTimer) -> None:
        """Replace the timer of this name."""
        self._moments[timer.name] = timer.at

    def due(self) -> str | None:
        """Rest until the next timer is due and return its name. Woken before, None: look around."""
        if not self._moments:
            self._bell.rest(LOOK_AROUND_S)
            return None
        if self._reach.is_back and RETRY in self._moments:
            self._moments[RETRY] = self._bell.now()
        name, at = min(self._moments.items(), key=lambda item: item[1])
        left_s = at - self._bell.now()
        if left_s > 0:
            self._waiting(left_s)
            self._bell.rest(left_s)
            return None
        del self._moments[name]
        return name
