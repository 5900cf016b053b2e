"""A staleness function of one's own: S(tau) = 2^(-tau / half_life)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class HalfLife:
    name: ClassVar[str] = "half_life"
    half_life: float = 10.0  # strategy.staleness = {name = "...", half_life = 10}

    def __call__(self, tau: float) -> float:
        return float(2.0 ** (-tau / self.half_life))
