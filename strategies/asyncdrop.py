"""AsyncDrop: every device trains a sub-model, which is mixed into the model at once.

| symbol  | name         | meaning                                                              |
|---------|--------------|----------------------------------------------------------------------|
| W_t     | vector       | global model of version t                                            |
| M_i     | update.where | the coordinates of device i's sub-model                              |
| W_base  | context.base | the version the device started from                                  |
| Delta_i | update.delta | W_i - W_base on M_i                                                  |
| alpha   | alpha        | mixing weight                                                        |

    on M_i:       W_{t+1} = (1 - alpha) W_t + alpha (W_base + Delta_i)
    elsewhere:    W_{t+1} = W_t

There is no weight by staleness or by examples, and activations are not scaled for what is left out. Which
units a task keeps is a planner's choice (`submodels/`): by default Hetero AsyncDrop's, by the device's speed
and by how far each unit is from its first value; with `[submodel] name = "random"` plain AsyncDrop's; with
"none" the rule is FedAsync's with a constant S.

Source: Dun, Hipolito, Jermaine, Dimitriadis and Kyrillidis, "Efficient and light-weight federated learning
via asynchronous distributed dropout", AISTATS 2023, algorithms 1 to 3; alpha = 0.5 and a quarter left out are
the paper's settings. The published script zeroes channels of a full-size model and finds out by comparing
what was trained; here the sub-model is really smaller and its map travels with the task. Left out: the
paper's schedule of the learning rate, which goes by the epochs of the fastest device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from anabranch.core.engine.strategy import AsyncStrategy, Context, Step, published
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Vector, add_scaled
from anabranch.core.model.updates import Update


@dataclass(frozen=True)
class AsyncDropState:
    """Nothing but the model; W_0 and the scores are the planner's."""


@dataclass(frozen=True)
class AsyncDrop(AsyncStrategy):
    """See the module for the equations and the symbols."""

    name: ClassVar[str] = "asyncdrop"
    state_type: ClassVar[type[Any]] = AsyncDropState
    supports_submodels: ClassVar[bool] = True
    submodel: ClassVar[str] = "hetero"

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ConfigError(f"strategy.alpha must be in (0, 1], not {self.alpha!r}")

    @property
    def needs_base(self) -> bool:
        """Models are mixed."""
        return True

    def init(self, vector: Vector) -> AsyncDropState:
        """Nothing to remember."""
        return AsyncDropState()

    def step(self, state: AsyncDropState, vector: Vector, update: Update, context: Context) -> Step:
        """Mix the sub-model in, publish."""
        assert context.base is not None, "asyncdrop mixes models: it needs w_base"
        at = update.where
        vector[at] *= vector.dtype.type(1.0 - self.alpha)
        add_scaled(vector, self.alpha, context.base[at], at)
        add_scaled(vector, self.alpha, update.delta, at)
        return Step(state, vector, published(context.staleness, self.alpha))
