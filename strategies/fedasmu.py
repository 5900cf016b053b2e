"""FedASMU: every update is mixed in at once, by less the older it is and the further the run has come.

| symbol | name            | meaning                                                       |
|--------|-----------------|---------------------------------------------------------------|
| t      |                 | number of the version that comes of the update, from 1 on     |
| t - o  | staleness       | versions since the device started, of a part those of it      |
| lambda | scale           | weight of a fresh update in the first version                 |
| sigma  | staleness_power | how fast the weight falls with age                            |
| iota   | floor           | weight that no age takes away                                 |
| mu     | mu              | how fast alpha comes near 1 as the weight grows               |
| alpha  | weight          | mixing weight of the update                                   |
| Delta  | update.delta    | w_new - w_base, as the device sent it                         |

    xi    = lambda sqrt(t) / (t (t - o + 1)^sigma) + iota
    alpha = mu xi / (1 + mu xi)
    w     <- (1 - alpha) w + alpha (w_base + Delta)

So alpha falls as 1 / sqrt(t), down to mu iota / (1 + mu iota). Updates of more than `staleness_max` versions
are not used (0: all are).

Source: Liu et al., "FedASMU", AAAI 2024, arXiv 2312.05770, whose equations were read in re-implementations.
There lambda, sigma and iota are of each device and learned on the way; here they are the run's. The fresh
model that a device takes in there while it trains, at a moment that is learned, is not here; devices that
train on take one in after every push (`client.push = "elastic"`, `client.merge = "blend"`). All defaults are
ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from anabranch.core.engine.strategy import Context
from anabranch.core.model.updates import Update
from anabranch.strategies.mixing import MixingStrategy
from anabranch.strategies.parameters import NOT_NEGATIVE, POSITIVE


@dataclass(frozen=True)
class FedASMU(MixingStrategy):
    """Mixes the model that each update reached into the model, by its age and the run's.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "fedasmu"

    mu: Annotated[float, POSITIVE] = 1.0
    scale: Annotated[float, POSITIVE] = 10.0
    staleness_power: Annotated[float, NOT_NEGATIVE] = 0.5
    floor: Annotated[float, NOT_NEGATIVE] = 0.0
    staleness_max: Annotated[int, NOT_NEGATIVE] = 0

    def weight(self, update: Update, context: Context) -> float:
        """Alpha."""
        t, age = context.version + 1, context.staleness + 1
        xi = self.scale / (math.sqrt(t) * age**self.staleness_power) + self.floor
        return float(self.mu * xi / (1 + self.mu * xi))
