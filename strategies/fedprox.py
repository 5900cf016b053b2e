"""FedProx: FedAvg whose devices add a proximal term to their loss.

| symbol | name | meaning                                       |
|--------|------|-----------------------------------------------|
| mu     | mu   | weight of the proximal term                   |
| w_t    | -    | the global model a device started from        |

    device:  min_w  F_i(w) + (mu/2) ||w - w_t||^2
    server:  as FedAvg; a device may do less than the planned work (`local_steps` says how much it did)

Source: Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, algorithm 2; recalled, and
so is that mu has no default there but is tuned over {0.001, 0.01, 0.1, 1}. Its default here is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from anabranch.core.engine.strategy import Context, Plan
from anabranch.core.model.updates import Ask, LocalPlan
from anabranch.strategies.fedavg import FedAvg, FedAvgState
from anabranch.strategies.parameters import NOT_NEGATIVE


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg, whose devices are pulled back to the model that they started from.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "fedprox"

    mu: Annotated[float, NOT_NEGATIVE] = 0.01

    def plan(self, state: FedAvgState, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """FedAvg's task, with the proximal term."""
        plan = super().plan(state, ask, local, context)
        return replace(plan, local=replace(plan.local, proximal_mu=self.mu))
