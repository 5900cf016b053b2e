"""AsyncDrop: every device trains a sub-model, which is mixed into the model at once.

Experimental: in our own study it is no sooner than asynchronous FedAvg (docs/strategies.md).

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
from typing import Annotated, ClassVar

from anabranch.core.engine.strategy import Context
from anabranch.core.model.updates import Update
from anabranch.strategies.mixing import MixingStrategy
from anabranch.strategies.parameters import POSITIVE_FRACTION


@dataclass(frozen=True)
class AsyncDrop(MixingStrategy):
    """Mixes each update of a sub-model into the model, where it covers it.

    Experimental (docs/strategies.md). Symbols and equations: see the module.
    """

    name: ClassVar[str] = "asyncdrop"
    submodel: ClassVar[str] = "hetero"

    alpha: Annotated[float, POSITIVE_FRACTION] = 0.5

    def weight(self, update: Update, context: Context) -> float:
        """alpha, whatever the staleness."""
        return self.alpha
