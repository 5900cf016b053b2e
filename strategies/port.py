"""PORT: K updates are averaged, each weighed by its examples, its age, and whether it goes the model's way.

| symbol    | name              | meaning                                                                  |
|-----------|-------------------|--------------------------------------------------------------------------|
| K         | buffer_size       | updates in a buffer                                                      |
| n_i       | update.examples   | examples of device i                                                     |
| tau_i     | context.staleness | versions since device i started                                          |
| S_b       | staleness_bound   | the age at which the share for freshness is halved                       |
| a         | similarity_weight | how much it counts that an update goes where the model went since        |
| b         | staleness_weight  | how much it counts that it is fresh                                      |
| Delta_i   | update.delta      | w_i - w_base of device i                                                 |
| c_i       | similarity        | cosine of the angle between Delta_i and w_t - w_base                     |

    p_i = n_i (a (1 + c_i) / 2 + b S_b / (tau_i + S_b))
    w <- w + sum p_i Delta_i / sum p_i

c_i is 1 where the model is still that of the base, whatever a lossy downlink has made of it: nothing has been
learned since that an update could contradict. Of a part of the model c_i is of its own coordinates, and each
coordinate has the mean of those that cover it. An update is weighed when it comes: no version is made while a
buffer fills, so at its end it would weigh the same.

A device that is S_b versions behind is told to send what it has: `server.upload_now_versions`, which those
that train on obey (`client.push = "elastic"`); `server.staleness_max` refuses what is older.

Source: Su and Li, "How asynchronous can federated learning be?", IWQoS 2022; the rule as in its published
code, which gathers 15 updates of 30 devices with S_b = 10, a = 1 and b = 3. There c_i compares with the
version before the last, whatever the device's own base was; here with that base. K = 10 is FedBuff's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from anabranch.core.engine.strategy import Context
from anabranch.core.model.arrays import inner
from anabranch.core.model.params import Vector, dense
from anabranch.core.model.submodels import gathered
from anabranch.core.model.updates import Update
from anabranch.strategies.buffer import WeighedBuffer
from anabranch.strategies.parameters import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE


@dataclass(frozen=True)
class PORT(WeighedBuffer):
    """Gathers K updates, and averages them by examples, age and direction.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "port"

    buffer_size: Annotated[int, AT_LEAST_ONE] = 10
    staleness_bound: Annotated[float, POSITIVE] = 10.0
    similarity_weight: Annotated[float, NOT_NEGATIVE] = 1.0
    staleness_weight: Annotated[float, POSITIVE] = 3.0
    flush_s: Annotated[float, NOT_NEGATIVE] = 0.0

    @property
    def needs_base(self) -> bool:
        """To see where the model went since."""
        return True

    @property
    def mixes_models(self) -> bool:
        """Differences are added up."""
        return False

    def weight_in(self, vector: Vector, update: Update, context: Context) -> float:
        """p_i / n_i."""
        assert context.base is not None, "a direction since w_base"
        fresh = self.staleness_bound / (context.staleness + self.staleness_bound)
        # Of the newest version w_base is w_t but for what the downlink has rounded, which is no direction.
        is_newest = context.rules and not context.staleness
        c = 1.0 if is_newest else similarity(vector, context.base, update)
        towards = (1.0 + c) / 2
        return self.similarity_weight * towards + self.staleness_weight * fresh

    def share_of(self, update: Update, weight: float) -> float:
        """p_i."""
        return weight * update.examples


def similarity(vector: Vector, base: Vector, update: Update) -> float:
    """c_i, from -1 to 1."""
    went = gathered(vector, update.submodel) - gathered(base, update.submodel)
    sent = dense(update.delta)
    lengths = math.sqrt(inner(went, went)) * math.sqrt(inner(sent, sent))
    return inner(went, sent) / lengths if lengths else 1.0
