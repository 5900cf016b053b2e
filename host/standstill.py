"""When a run that stands still says so: what lasts is said again after pauses that double."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.core.model.updates import Reason

WANTS_ONE = (Reason.AT_CAPACITY, Reason.NOT_SELECTED, Reason.OVER_SHARE, Reason.TOO_FAST)


@dataclass
class Pause:
    """When to say again what lasts: after `first_s`, then twice as long each time."""

    first_s: float
    after_s: float = 0.0

    def due(self, lasted_s: float) -> bool:
        """Whether to say it now, after so long."""
        if lasted_s < max(self.after_s, self.first_s):
            return False
        self.after_s = 2.0 * lasted_s
        return True

    def over(self) -> None:
        """It lasts no longer."""
        self.after_s = 0.0


class Lasting:
    """Trouble that is heard of again and again, and over once it was not for `again_s`."""

    def __init__(self, again_s: float) -> None:
        self._again_s, self._pause = again_s, Pause(again_s)
        self._since: float | None = None
        self._heard_at = 0.0

    def heard(self, now: float) -> float | None:
        """For how long it has lasted, where that is to be said: at once, and after pauses that double."""
        heard_at, self._heard_at = self._heard_at, now
        if self._since is None or now - heard_at > self._again_s:
            self._since = now
            self._pause.over()
            return 0.0
        lasted_s = now - self._since
        return lasted_s if self._pause.due(lasted_s) else None
