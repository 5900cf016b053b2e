"""A strategy of one's own: w <- w + min(1, t / warm_up) / (1 + tau) Delta: a slow start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from anabranch.core.engine.strategy import AsyncStrategy, Context, Step, published
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Vector, add_scaled
from anabranch.core.model.updates import Update


@dataclass(frozen=True)
class Applied:
    """t: how many updates there were."""

    updates: int = 0


@dataclass(frozen=True)
class WarmUp(AsyncStrategy):
    name: ClassVar[str] = "warm_up"
    state_type: ClassVar[type[Any]] = Applied
    warm_up: int = 10  # strategy.warm_up

    def __post_init__(self) -> None:
        if self.warm_up < 1:
            raise ConfigError(f"strategy.warm_up must be at least 1, not {self.warm_up!r}")

    def init(self, vector: Vector) -> Applied:
        return Applied()

    def step(self, state: Applied, vector: Vector, update: Update, context: Context) -> Step:
        applied = Applied(state.updates + 1)
        weight = min(1.0, applied.updates / self.warm_up) / (1.0 + context.staleness)
        add_scaled(vector, weight, update.delta)
        return Step(applied, vector, published(context.staleness, weight))
