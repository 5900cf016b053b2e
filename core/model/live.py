"""The weights of a model in training, as seen between two local steps."""

from __future__ import annotations

from typing import Protocol

from anabranch.core.model.params import Vector


class LiveWeights(Protocol):
    """For the thread that trains alone, where no step is half done."""

    def flat(self) -> Vector:
        """A copy, (spec.size,)."""
        ...

    def add(self, change: Vector) -> None:
        """Add (spec.size,) numbers in place."""
        ...
