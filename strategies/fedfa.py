"""FedFa: the model is the mean of the newest models that devices have reached.

| symbol | name          | meaning                                                        |
|--------|---------------|----------------------------------------------------------------|
| K      | window_size   | models in the window                                           |
| w_i    | state.window  | w_base + Delta, the models of the newest K updates             |

    w <- (1/K) sum_i w_i      the oldest leaves once there are more than K

Every update makes a version, and nobody waits for a buffer to fill: an update counts for K versions, and then
no more. Of fewer than K updates the mean is of those. No weight goes by age.

The window is part of the state: K models of P numbers are 4 K P bytes, in every snapshot too. Its sum is made
anew each time: in one that is kept, a model that was much too large would leave the others without digits.

Source: Xu et al., "FedFa", IJCAI 2024, of which the abstract was read: a window of the newest models, whose
mean is the model, at every update. What is done before the window is full, and K, are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np

from anabranch.core.engine.strategy import Context, State, Step
from anabranch.core.model.params import Vector, add_scaled
from anabranch.core.model.updates import Update
from anabranch.strategies.composition import ComposedStrategy
from anabranch.strategies.parameters import AT_LEAST_ONE


@dataclass(frozen=True)
class FedFaState:
    """`window`: models, each of shape (size,), the oldest first."""

    window: list[Vector] = field(default_factory=list)


@dataclass(frozen=True)
class FedFa(ComposedStrategy):
    """Takes the mean of the newest K models at every update.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "fedfa"
    state_type: ClassVar[type[Any]] = FedFaState

    window_size: Annotated[int, AT_LEAST_ONE] = 10

    @property
    def needs_base(self) -> bool:
        """Models are averaged."""
        return True

    def init(self, vector: Vector) -> State:
        """An empty window."""
        return FedFaState()

    def weight(self, update: Update, context: Context) -> float:
        """Its part of a full window."""
        return 1.0 / self.window_size

    def fold(self, state: State, vector: Vector, update: Update, weight: float, context: Context) -> Step:
        """Into the window, out with the oldest; publish."""
        assert context.base is not None, "a model needs w_base"
        reached = context.base.copy()
        add_scaled(reached, 1.0, update.delta)
        window = [*state.window, reached][-self.window_size :]
        total = np.zeros(vector.size)
        for model in window:
            total += model
        np.divide(total, len(window), out=vector, casting="same_kind")
        return Step(FedFaState(window), vector)
