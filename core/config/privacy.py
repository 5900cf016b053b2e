"""The `[privacy]` table: central differential privacy of what a run publishes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from anabranch.core.errors import ConfigError
from anabranch.core.privacy.accountant import epsilon_of, mu_of, sensitivity

BANDS_MAX = 16  # of bands that are not said: each but the first is a vector of the model's size in memory
ROUNDING = 1e-9  # of itself: to which an epsilon is known
SEEDED = " of run.seed"  # of a mechanism whose noise whoever knows the configuration can take off again
NOISE_STEPS = 1e6  # a noise that follows of an epsilon is rounded up to a millionth: alike on every machine


def epsilon_text(epsilon: float) -> str:
    """In three digits, rounded up: no less is said than what is promised."""
    if not 0 < epsilon < math.inf:
        return f"{epsilon:g}"
    step = 10.0 ** (math.floor(math.log10(epsilon)) - 2)
    return f"{math.ceil(epsilon / step * (1 - ROUNDING)) * step:.3g}"


@dataclass(frozen=True)
class Promise:
    """What a private run promises: (epsilon, delta) for the whole of it, and for what it has published.

    `unit`: whose data. `adjacency`: between what two cases; `zero-out`: all values of one device are zero,
    and when it asks and answers is the same. `noise` is the deviation of a coordinate in clips. A `mechanism`
    "of run.seed" is that of a simulation with masked sums: there the promise is what a live run would keep.
    """

    epsilon: float
    delta: float
    epsilon_so_far: float
    unit: str
    adjacency: str
    mechanism: str
    clip: float
    noise: float
    bands: int
    participations_max: int
    separation: int

    @property
    def caveat(self) -> str:
        """Why it does not hold here; empty where it does."""
        seeded = self.mechanism.endswith(SEEDED)
        return "as a live run would have it; here the noise follows from run.seed" if seeded else ""

    def text(self) -> str:
        """In a line."""
        epsilon, so_far = epsilon_text(self.epsilon), epsilon_text(self.epsilon_so_far)
        return (
            f"private: epsilon {epsilon} ({so_far} so far) at delta {self.delta:g} "
            f"for each {self.unit}: {self.participations_max} updates of length {self.clip:g} at most"
            f"{self.caveat and f', {self.caveat}'}"
        )


@dataclass(frozen=True)
class PrivacyTable:
    """`[privacy]`: central differential privacy of what a run publishes.

    Each update is cut to the length `clip` (0: the run is not private). Every sum of them gets normal noise
    of `noise` clips a coordinate; or of as much as `epsilon` needs, at `delta`. One of the two is said. One
    device's updates are `participations` at most, and at least `separation` versions apart. The noise of
    `bands` versions is correlated (0: of as many as the separation, 16 at most; 1: independent).
    """

    clip: float = 0.0
    noise: float = 0.0
    epsilon: float = 0.0
    delta: float = 1e-6
    participations: int = 1
    separation: int = 1
    bands: int = 0

    @property
    def on(self) -> bool:
        """Whether the run is private."""
        return self.clip > 0

    @classmethod
    def of_json(cls, config: Mapping[str, Any]) -> PrivacyTable:
        """That of a configuration as plain values, of whatever release."""
        return cls(**config.get("privacy", {}))

    def check(self) -> None:
        """Raises `ConfigError`, naming the key; that numbers are not negative is checked for all tables."""
        if not self.on:
            self._check_off()
            return
        if (self.noise > 0) == (self.epsilon > 0):
            raise ConfigError(
                f"privacy.noise is {self.noise!r} and privacy.epsilon {self.epsilon!r}: say one of the two, "
                "how much noise there is or what it must come to, and leave the other out"
            )
        if not 0 < self.delta < 1:
            raise ConfigError(
                f"privacy.delta must be between 0 and 1, not {self.delta!r}: well below 1 / the devices"
            )
        for key in ("participations", "separation"):
            if getattr(self, key) < 1:
                raise ConfigError(f"privacy.{key} must be at least 1, not {getattr(self, key)!r}")
        if self.bands > self.separation:
            raise ConfigError(
                f"privacy.bands must be at most privacy.separation, {self.separation}, not {self.bands!r}: "
                "two updates of a device under one correlated noise would count more than twice"
            )

    def _check_off(self) -> None:
        said = [key for key in ("noise", "epsilon") if getattr(self, key)]
        if said:
            raise ConfigError(
                f"privacy.{said[0]} is set and privacy.clip is not: set the length that updates are cut to"
            )

    @property
    def bands_used(self) -> int:
        """M."""
        return self.bands or min(self.separation, BANDS_MAX)

    @property
    def sensitivity(self) -> float:
        """How far one device moves all releases of the run together, in clips."""
        return sensitivity(self.bands_used, self.participations)

    @cached_property
    def noise_used(self) -> float:
        """z: as said, or the least in millionths that epsilon needs."""
        if self.noise:
            return self.noise
        return math.ceil(self.sensitivity / mu_of(self.epsilon, self.delta) * NOISE_STEPS) / NOISE_STEPS

    def _epsilon_of(self, participations: int) -> float:
        """Epsilon where no device gives more updates than these."""
        return epsilon_of(sensitivity(self.bands_used, participations) / self.noise_used, self.delta)

    def promise(self, sums: int, seeded: bool = False) -> Promise | None:
        """What holds for a run of which so many sums were seen; None for one that is not private.

        That is its versions, and those masked sums of which no version was made. `seeded`: the noise follows
        from `run.seed`.
        """
        if not self.on:
            return None
        mechanism = "gaussian" if self.bands_used == 1 else "correlated gaussian"
        so_far = min(self.participations, -(-sums // self.separation))
        return Promise(
            epsilon=self._epsilon_of(self.participations),
            delta=self.delta,
            epsilon_so_far=self._epsilon_of(so_far),
            unit="device",
            adjacency="zero-out",
            mechanism=mechanism + SEEDED * seeded,
            clip=self.clip,
            noise=self.noise_used,
            bands=self.bands_used,
            participations_max=self.participations,
            separation=self.separation,
        )
