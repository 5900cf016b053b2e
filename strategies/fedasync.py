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
from functools import cached_property
from typing import Any, ClassVar

from anabranch.core.engine.strategy import AsyncStrategy, Context, Plan, Step, published
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Vector, add_scaled
from anabranch.core.model.updates import Ask, LocalPlan, Update
from anabranch.strategies.staleness import StalenessFunction, make_staleness


@dataclass(frozen=True)
class FedAsyncState:
    """FedAsync remembers nothing but the model."""


@dataclass(frozen=True)
class FedAsync(AsyncStrategy):
    """See the module for the equations and the symbols."""

    name: ClassVar[str] = "fedasync"
    state_type: ClassVar[type[Any]] = FedAsyncState
    supports_submodels: ClassVar[bool] = True

    alpha: float = 0.6
    rho: float = 0.005
    staleness: Mapping[str, Any] = field(default_factory=lambda: {"name": "polynomial", "a": 0.5})

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ConfigError(f"strategy.alpha must be in (0, 1], not {self.alpha!r}")
        if self.rho < 0:
            raise ConfigError(f"strategy.rho must not be negative, not {self.rho!r}")
        _ = self.s

    @cached_property
    def s(self) -> StalenessFunction:
        """S."""
        return make_staleness(self.staleness)

    @property
    def needs_base(self) -> bool:
        """Models are mixed."""
        return True

    def init(self, vector: Vector) -> FedAsyncState:
        """Nothing to remember."""
        return FedAsyncState()

    def plan(self, state: FedAsyncState, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """Local training with the proximal term."""
        return Plan(state, replace(local, proximal_mu=self.rho))

    def step(self, state: FedAsyncState, vector: Vector, update: Update, context: Context) -> Step:
        """Mix, publish."""
        assert context.base is not None, "fedasync mixes models: it needs w_base"
        alpha_t = self.alpha * self.s(context.staleness)
        at = update.where
        vector[at] *= vector.dtype.type(1.0 - alpha_t)
        add_scaled(vector, alpha_t, context.base[at], at)
        add_scaled(vector, alpha_t, update.delta, at)
        return Step(state, vector, published(context.staleness, alpha_t))
