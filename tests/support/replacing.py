"""A merge that no device may have: the negative control of what merges promise."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.core.model.params import Vector
from anabranch.host.merging import LiveWeights


@dataclass(frozen=True)
class Replacement:
    """The server's model in the place of the device's own."""

    def apply(self, live: LiveWeights, snapshot: Vector, center: Vector) -> None:
        """All that was learned since the snapshot is lost."""
        live.add(center - live.flat())
