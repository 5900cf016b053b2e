"""An attack of one's own: hostile devices send the median of their honest updates, backwards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anabranch.core.model.params import Vector
from anabranch.simulation.attacks import Poison


class Backwards(Poison):
    name, strength, colluders = "backwards", 2.0, 3

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        return np.asarray(-s * np.median(deltas, axis=0))
