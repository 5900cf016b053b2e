"""FedBuff's mean g with Nesterov's momentum at the server: m <- mu m + g, w <- w + eta (g + mu m)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from anabranch.core.model.params import Vector
from anabranch.strategies.buffer import BufferStrategy
from anabranch.strategies.parameters import AT_LEAST_ONE, LESS_THAN_ONE, POSITIVE


@dataclass(frozen=True)
class Nesterov:
    eta: float
    mu: float

    def init(self, vector: Vector) -> dict[str, Any]:
        return {"moment": np.zeros_like(vector)}

    def step(self, state: Any, vector: Vector, total: Vector, count: float) -> Any:
        moment = self.mu * state.moment + total / count
        vector += self.eta * (total / count + self.mu * moment)
        return replace(state, moment=moment)


@dataclass(frozen=True)
class NesterovBuffer(BufferStrategy):
    name: ClassVar[str] = "nesterov_buffer"
    buffer_size: Annotated[int, AT_LEAST_ONE] = 10  # strategy.buffer_size
    eta: Annotated[float, POSITIVE] = 0.7
    mu: Annotated[float, LESS_THAN_ONE] = 0.9
    staleness: dict[str, Any] = field(default_factory=lambda: {"name": "polynomial", "a": 0.5})

    @property
    def optimiser(self) -> Nesterov:
        return Nesterov(self.eta, self.mu)
