"""What merges are tried with: weights without a model, and a merge that no device may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anabranch.core.model.live import LiveWeights
from anabranch.core.model.params import Vector


class Live:
    """Weights without a model."""

    def __init__(self, *values: float) -> None:
        self.vector = np.asarray(values, np.float32)

    def flat(self) -> Any:
        return self.vector.copy()

    def add(self, change: Any) -> None:
        self.vector += change


def vector(*values: float) -> Any:
    return np.asarray(values, np.float32)


@dataclass(frozen=True)
class Replacement:
    """The server's model in the place of the device's own: the negative control of what merges promise."""

    def apply(self, live: LiveWeights, snapshot: Vector, center: Vector) -> None:
        """All that was learned since the snapshot is lost."""
        live.add(center - live.flat())
