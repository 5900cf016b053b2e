"""Delayed Nesterov: every update moves the model at once, the momentum only every N updates.

| symbol  | name        | meaning                                                          |
|---------|-------------|------------------------------------------------------------------|
| N       | buffer_size | updates between two turns of the momentum                        |
| lr      | server_lr   | learning rate of the server                                      |
| beta    | momentum    | momentum of the server                                           |
| c       | c           | how much of the old momentum each update takes along, 0 to 1/N   |
| s       | staleness   | staleness function                                               |
| Delta_t | update.delta| w_new - w_base, as the device sent it                            |
| m       | state.moment| running direction of the server                                  |
| S       | state.total | sum of g since its last turn                                     |

    g_t = s(tau_t) Delta_t,  S <- S + g_t
    N - 1 of N:  w <- w + lr (c beta m + g_t / N)
    the N-th:    m <- beta m + S / N,  w <- w + lr ((1 - c N + c) beta m + g_t / N),  S <- 0

With N = 1 and c = 0 it is Nesterov's step for each update, with beta = 0 FedBuff's of one update and of the
rate lr / N. Rates are as written: nothing is multiplied by N, as the scripts of HALoS do with the rate before
they hand it to this rule.

Source: Liu et al., "Asynchronous local-SGD training for language modeling", arXiv 2401.09135, for c = 0; the
general c as in the published code of HALoS (ICML 2025). The defaults are DiLoCo's in its published code, and
N = 8 is ours. docs/studies/outer.md measures it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from anabranch.core.engine.strategy import Context, State, Step
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Vector, add_scaled
from anabranch.core.model.updates import Update
from anabranch.strategies.composition import ComposedStrategy
from anabranch.strategies.parameters import AT_LEAST_ONE, LESS_THAN_ONE, NOT_NEGATIVE, POSITIVE


@dataclass(frozen=True)
class DelayedState:
    """`moment` m and `total` S, shape (size,); `count`: updates since the momentum's last turn."""

    moment: Vector
    total: Vector
    count: int = 0


@dataclass(frozen=True)
class DelayedNesterov(ComposedStrategy):
    """Adds each update at once, and lets the momentum follow every N of them.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "delayed_nesterov"
    state_type: ClassVar[type[Any]] = DelayedState

    buffer_size: Annotated[int, AT_LEAST_ONE] = 8
    server_lr: Annotated[float, POSITIVE] = 0.7
    momentum: Annotated[float, LESS_THAN_ONE] = 0.9
    c: Annotated[float, NOT_NEGATIVE] = 0.0
    staleness: Mapping[str, Any] = field(default_factory=lambda: {"name": "polynomial", "a": 0.5})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c * self.buffer_size > 1:
            bound = f"[0, 1/{self.buffer_size}], up to 1 / strategy.buffer_size"
            raise ConfigError(f"strategy.c must be in {bound}, not {self.c!r}")

    def init(self, vector: Vector) -> State:
        """No direction yet."""
        return DelayedState(np.zeros_like(vector), np.zeros_like(vector))

    def fold(self, state: State, vector: Vector, update: Update, weight: float, context: Context) -> Step:
        """The update's own step, and the momentum's share; publish."""
        n, count = self.buffer_size, state.count + 1
        add_scaled(state.total, weight, update.delta)
        along = self.c
        if count == n:
            np.multiply(state.moment, vector.dtype.type(self.momentum), out=state.moment)
            add_scaled(state.moment, 1.0 / n, state.total)
            state.total.fill(0)
            along, count = 1.0 - self.c * n + self.c, 0
        if along:
            add_scaled(vector, self.server_lr * along * self.momentum, state.moment)
        add_scaled(vector, self.server_lr * weight / n, update.delta)
        return Step(replace(state, count=count), vector)
