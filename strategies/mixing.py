"""Strategies that mix each update into the model at once, on the coordinates that it covers.

| symbol  | name          | meaning                                             |
|---------|---------------|-----------------------------------------------------|
| w_t     | vector        | global model of version t                           |
| w_base  | context.base  | the version the device started from                 |
| Delta   | update.delta  | w_new - w_base, as the device sent it               |
| alpha_t | weight        | mixing weight of this update                        |

    w_{t+1} = (1 - alpha_t) w_t + alpha_t (w_base + Delta)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from anabranch.core.engine.strategy import Context, State, Step
from anabranch.core.model.params import SparseVector, Vector, add_scaled
from anabranch.core.model.submodels import add_to_part
from anabranch.core.model.updates import Update
from anabranch.strategies.composition import ComposedStrategy


@dataclass(frozen=True)
class NoState:
    """Nothing is remembered but the model."""


class MixingStrategy(ComposedStrategy):
    """No buffer: see the module for the equation."""

    state_type: ClassVar[type[Any]] = NoState
    supports_submodels: ClassVar[bool] = True

    @property
    def needs_base(self) -> bool:
        """Models are mixed."""
        return True

    def init(self, vector: Vector) -> State:
        """Nothing to remember."""
        return self.state_type()

    def fold(self, state: State, vector: Vector, update: Update, weight: float, context: Context) -> Step:
        """Mix, publish."""
        assert context.base is not None, "mixing needs w_base"
        kept = vector.dtype.type(1.0 - weight)
        if update.submodel is None:
            vector *= kept
            add_scaled(vector, weight, context.base)
            add_scaled(vector, weight, update.delta)
            return Step(state, vector)
        for block in update.submodel.blocks():
            values = block.take(vector)
            values *= kept
            add_scaled(values, weight, block.take(context.base))
            if not isinstance(update.delta, SparseVector):
                add_scaled(values, weight, update.delta[block.at])
            block.put(values, vector)
        if isinstance(update.delta, SparseVector):
            add_to_part(vector, weight, update.delta, update.submodel)
        return Step(state, vector)
