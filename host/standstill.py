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
