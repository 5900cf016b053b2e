"""Server optimisers: what step of the model the mean of a buffer or of a round is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from anabranch.core.engine.strategy import State
from anabranch.core.model.params import Vector, add_scaled


class Optimiser(Protocol):
    """One rule for the step. A frozen dataclass of its parameters, pure.

    What it remembers are fields of the strategy's state, so that a strategy says them with the others.
    """

    def init(self, vector: Vector) -> dict[str, Any]:
        """Its fields of the state before the first step."""
        ...

    def step(self, state: State, vector: Vector, total: Vector, count: float) -> State:
        """Add the step for the mean `total / count`, (size,), to `vector`; the state with its fields.

        It may write on its own arrays of the state; `total` is not its own.
        """
        ...


@dataclass(frozen=True)
class Sgd:
    """w <- w + rate g."""

    rate: float = 1.0

    def init(self, vector: Vector) -> dict[str, Any]:
        """Nothing."""
        return {}

    def step(self, state: State, vector: Vector, total: Vector, count: float) -> State:
        """The step, in place."""
        add_scaled(vector, self.rate / count, total)
        return state


@dataclass(frozen=True)
class Momentum(Sgd):
    """m <- momentum m + g, w <- w + rate m, where m is `moment`, empty without momentum."""

    momentum: float = 0.0

    def init(self, vector: Vector) -> dict[str, Any]:
        """No direction yet."""
        return {"moment": np.zeros_like(vector) if self.momentum else np.empty(0, vector.dtype)}

    def step(self, state: State, vector: Vector, total: Vector, count: float) -> State:
        """The step, in place."""
        if not self.momentum:
            return super().step(state, vector, total, count)
        np.multiply(state.moment, vector.dtype.type(self.momentum), out=state.moment)
        add_scaled(state.moment, 1.0 / count, total)
        return super().step(state, vector, state.moment, 1.0)
