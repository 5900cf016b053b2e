"""FADAS: an adaptive optimiser at the server, whose rate falls with the delay of what it is given.

| symbol  | name           | meaning                                                         |
|---------|----------------|-----------------------------------------------------------------|
| M       | buffer_size    | updates in a buffer                                             |
| eta     | server_lr      | server learning rate                                            |
| beta_1  | momentum       | how much of the last direction stays                            |
| beta_2  | beta2          | how much of the mean square stays                               |
| eps     | eps            | what keeps a step finite where nothing has moved                |
| tau_c   | delay_max      | the greatest delay that costs nothing (0: none costs anything)  |
| tau     | state.delay    | the greatest staleness in the buffer                            |
| Delta_i | update.delta   | w_i - w_base of device i                                        |
| m, v    | state.moment,  | direction and mean square, zeros at first                       |
|         | second         |                                                                 |
| v_max   | state.greatest | the greatest v so far                                           |

    D = (1/M) sum_i Delta_i
    m <- beta_1 m + (1 - beta_1) D;  v <- beta_2 v + (1 - beta_2) D^2;  v_max <- max(v_max, v)
    eta_t = eta / tau where tau > tau_c, else eta
    w <- w + eta_t m / (1 - beta_1^t) / (sqrt(v_max / (1 - beta_2^t)) + eps)

No update is weighed by its own age. Rule and defaults are those of the published code, which corrects m and v
for their start and divides the rate by tau; descriptions of the paper have min(eta, 1/tau) in that place and
no correction. A step is about as long as the rate, whatever the lengths of the updates: tune it first.

Source: Wang et al., "FADAS: towards federated adaptive asynchronous optimization", ICML 2024,
arXiv 2407.18365.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from anabranch.core.config.tables import NO_KEY
from anabranch.core.engine.strategy import Context, State
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import Update
from anabranch.strategies.buffer import BufferState, BufferStrategy
from anabranch.strategies.optimisers import Adam, Optimiser
from anabranch.strategies.parameters import AT_LEAST_ONE, LESS_THAN_ONE, NOT_NEGATIVE, POSITIVE
from anabranch.strategies.robust.rule import Rule


@dataclass(frozen=True)
class FadasState(BufferState):
    """A buffer's, `greatest` v_max, shape (size,), and `delay`, the greatest staleness in the buffer."""

    greatest: Vector = field(default_factory=lambda: np.empty(0))
    delay: int = 0


@dataclass(frozen=True)
class DelayedAmsGrad(Adam):
    """Adam by the greatest mean square so far, at a rate that is divided by the buffer's delay."""

    delay_max: int = 1

    def init(self, vector: Vector) -> dict[str, Any]:
        """No step yet."""
        return {**super().init(vector), "greatest": np.zeros_like(vector)}

    def rate(self, state: State) -> float:
        """Eta, or eta / tau of a buffer whose tau is over tau_c."""
        return self.lr / state.delay if 0 < self.delay_max < state.delay else self.lr

    def squares(self, state: State) -> Vector:
        """v_max."""
        greatest: Vector = state.greatest
        np.maximum(greatest, state.second, out=greatest)
        return greatest


@dataclass(frozen=True)
class FADAS(BufferStrategy):
    """Gathers M updates, and takes AMSGrad's step by their mean at a rate that falls with their delay.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "fadas"
    state_type: ClassVar[type[Any]] = FadasState

    buffer_size: Annotated[int, AT_LEAST_ONE] = 5
    server_lr: Annotated[float, POSITIVE] = 0.001
    momentum: Annotated[float, LESS_THAN_ONE] = 0.9
    beta2: Annotated[float, LESS_THAN_ONE] = 0.99
    eps: Annotated[float, POSITIVE] = 1e-8
    delay_max: Annotated[int, NOT_NEGATIVE] = 1
    flush_s: Annotated[float, NOT_NEGATIVE] = 0.0
    rule: Rule | None = field(default=None, metadata=NO_KEY)

    @property
    def optimiser(self) -> Optimiser:
        """AMSGrad of these parameters."""
        return DelayedAmsGrad(self.server_lr, self.momentum, self.beta2, self.eps, self.delay_max)

    def gather(self, state: State, update: Update, weight: float, context: Context) -> State:
        """Add to the buffer, and note the delay."""
        state = super().gather(state, update, weight, context)
        return replace(state, delay=max(state.delay, context.staleness))

    def emptied(self, state: State, context: Context) -> State:
        """The state for the next buffer, which has no delay yet."""
        return replace(super().emptied(state, context), delay=0)
