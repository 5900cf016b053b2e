"""FedBuff: K deltas are gathered, then applied together.

| symbol  | name        | meaning                                                |
|---------|-------------|--------------------------------------------------------|
| K       | buffer_size | updates in a buffer                                    |
| eta_g   | server_lr   | server learning rate                                   |
| beta    | momentum    | server momentum (0: plain SGD)                         |
| s       | staleness   | staleness function                                     |
| Delta_i | update.delta| w_i - w_base of device i                               |
| m       | state.moment| running direction of the server                        |
| -       | outer       | another server optimiser, in their place               |

    g = (1/K) sum_i s(tau_i) Delta_i
    m <- beta m + g
    w <- w + eta_g m

Composed of a buffer (`buffer.py`), weights by staleness, and SGD with momentum. Concurrency is apart from
K: `[server] concurrency`. A device gets its next task at once. With `flush_s` an old buffer is applied
although it is not full. `outer` has other server optimisers, and the parameters of those (`optimisers.py`).

Source: Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022;
the rule was checked against published code, s = 1/sqrt(1 + tau) is recalled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from anabranch.core.config.tables import NO_KEY
from anabranch.strategies.buffer import BufferStrategy
from anabranch.strategies.optimisers import Momentum, Optimiser, outer_in_place
from anabranch.strategies.parameters import AT_LEAST_ONE, LESS_THAN_ONE, NOT_NEGATIVE, POSITIVE
from anabranch.strategies.robust.rule import Rule


@dataclass(frozen=True)
class FedBuff(BufferStrategy):
    """Gathers K updates and adds their mean, each weighed by its staleness.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "fedbuff"
    supports_submodels: ClassVar[bool] = True

    buffer_size: Annotated[int, AT_LEAST_ONE] = 10
    server_lr: Annotated[float, POSITIVE] = 1.0
    momentum: Annotated[float, LESS_THAN_ONE] = 0.0
    flush_s: Annotated[float, NOT_NEGATIVE] = 0.0
    staleness: Mapping[str, Any] = field(default_factory=lambda: {"name": "polynomial", "a": 0.5})
    outer: Mapping[str, Any] = field(default_factory=dict)
    rule: Rule | None = field(default=None, metadata=NO_KEY)

    @property
    def optimiser(self) -> Optimiser:
        """By eta_g and beta, or by `outer`."""
        own = {"momentum": "momentum", "server_lr": "lr"}
        return outer_in_place(self, own, Momentum(self.server_lr, self.momentum))
