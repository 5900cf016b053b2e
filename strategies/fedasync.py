"""FedAsync: every update is mixed into the model at once.

| symbol  | name        | meaning                                             |
|---------|-------------|-----------------------------------------------------|
| w_t     | vector      | global model of version t                           |
| w_base  | context.base| the version the device started from                 |
| Delta   | update.delta| w_new - w_base, as the device sent it               |
| tau     | staleness   | t - base version                                    |
| alpha   | alpha       | mixing weight                                       |
| S       | staleness   | staleness function                                  |
| rho     | rho         | weight of the proximal term of the local loss       |

    alpha_t = alpha * S(tau)
    w_{t+1} = (1 - alpha_t) w_t + alpha_t (w_base + Delta)

With a sub-model only its coordinates are mixed. Source: Xie, Koyejo and Gupta, arXiv 1903.03934,
algorithm 1. alpha = 0.6, a = 0.5 and rho = 0.005 are the defaults of public implementations, not
read in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from anabranch.core.engine.strategy import Context, Plan, State
from anabranch.core.model.updates import Ask, LocalPlan, Update
from anabranch.strategies.mixing import MixingStrategy
from anabranch.strategies.parameters import NOT_NEGATIVE, POSITIVE_FRACTION


@dataclass(frozen=True)
class FedAsync(MixingStrategy):
    """Mixes the model that each update reached into the model, by a share that shrinks with staleness.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "fedasync"

    alpha: Annotated[float, POSITIVE_FRACTION] = 0.6
    rho: Annotated[float, NOT_NEGATIVE] = 0.005
    staleness: Mapping[str, Any] = field(default_factory=lambda: {"name": "polynomial", "a": 0.5})

    def weight(self, update: Update, context: Context) -> float:
        """alpha_t."""
        return self.alpha * self.s(context.staleness)

    def plan(self, state: State, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """Local training with the proximal term."""
        return Plan(state, replace(local, proximal_mu=self.rho))
