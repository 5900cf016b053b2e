"""The terms of a run with masked sums: what its devices seal their seeds under, and its keepers keep to.

A device binds the digest of the terms that it knows into each box. So a server that tells a keeper other
terms than the devices, a longer clip, less noise, a smaller cohort, has boxes that do not open.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from anabranch.core.canonical import canonical
from anabranch.core.errors import ConfigError
from anabranch.core.limits import COHORT_MIN
from anabranch.core.secagg.ring import Ring, chain_of, whole_weight

STALENESS_MAX = 1024  # weights that are told one by one
FAR = 9.0  # deviations: noise beyond is of probability 2e-19 a value
# No update of a sum counts more than so many times another, r. Then (sum W)^2 / sum W^2 is at least 16/25 of
# the members, 4 r / (1 + r)^2 of them. The heaviest among n - 1 light ones is hid by (n - 1) / r^2 even ones.
STEEPEST = 4
COUNTS = ("bits", "value_bits", "size", "cohort", "cohort_min", "participations", "separation")


@dataclass(frozen=True)
class Terms:
    """What holds for all cohorts of a run.

    `weights`: of an update of staleness 0, 1, ...; the last is that of all beyond. `cohort`: updates in a
    sum, of them `cohort_min` at least. `noise`: deviation in clips that each keeper adds (0: none), then a
    device is in `participations` sums at most, their numbers `separation` apart. `keepers`: the fingerprints
    of all of them, sorted. `plan`: the digest of what all devices are told to train by (`plans.py`). It is
    empty in a run that an older release began: then its weights may be steeper than `STEEPEST`, and its boxes
    do not say what model an update was trained from.
    """

    bits: int
    value_bits: int
    clip: float
    size: int
    weights: tuple[int, ...]
    cohort: int
    cohort_min: int
    keepers: tuple[str, ...]
    noise: float = 0.0
    participations: int = 0
    separation: int = 0
    plan: str = ""

    @cached_property
    def ring(self) -> Ring:
        """Where the sums are made."""
        return Ring(self.bits, self.value_bits, self.clip, self.size)

    @property
    def codec(self) -> str:
        """What its updates travel as."""
        return chain_of(self.bits, self.value_bits)

    def weight(self, staleness: int) -> int:
        """W of an update."""
        return self.weights[min(staleness, len(self.weights) - 1)]

    @property
    def deviation(self) -> float:
        """Of one keeper's noise, in integers: z times the most that an update moves a sum."""
        return self.noise * max(self.weights) * self.ring.length

    def values_max(self, weight: int) -> int:
        """The largest integer that an honest sum of updates of so much weight can have."""
        return weight * self.ring.top + math.ceil(FAR * self._deviations)

    def length_max(self, weight: int) -> float:
        """The longest that such a sum can be."""
        return weight * self.ring.length + self._deviations * (math.sqrt(self.size) + FAR)

    @property
    def _deviations(self) -> float:
        return self.deviation * math.sqrt(len(self.keepers))

    def check(self) -> None:
        """Raises `ConfigError`, naming the key."""
        self.ring.check()
        if self.cohort_min < COHORT_MIN or self.cohort < self.cohort_min:
            raise ConfigError(
                f"secagg.cohort_min is {self.cohort_min} and a buffer has {self.cohort} updates: a sum of at "
                "least 2 hides one; take a larger strategy.buffer_size, or a smaller secagg.cohort_min"
            )
        if not self.weights or len(self.weights) > STALENESS_MAX or min(self.weights) < 1:
            raise ConfigError(
                f"weights of masked sums are whole numbers from 1, {STALENESS_MAX} of them at most"
            )
        if self.plan and max(self.weights) > STEEPEST * min(self.weights):
            raise ConfigError(
                f"weights of masked sums go from {min(self.weights)} to {max(self.weights)}: an update with "
                f"more than {STEEPEST} times the weight of others could be read in a sum"
            )
        if not self.keepers or list(self.keepers) != sorted(set(self.keepers)):
            raise ConfigError("secagg.keepers: name at least one keeper, and each once")
        if not 0 <= self.noise < math.inf or (self.noise > 0) != (self.participations > 0):
            raise ConfigError("masked sums have noise and participations from [privacy], or neither")
        self._check_range()

    def _check_range(self) -> None:
        levels = max(self.weights)
        needed = (2 * self.values_max(levels * self.cohort)).bit_length()
        bits = max(needed, self.value_bits + _bits(levels) + _bits(self.cohort))
        if bits > self.bits:
            noise = f", and noise of deviation {self.deviation:.0f}" if self.noise else ""
            raise ConfigError(
                f"secagg.value_bits = {self.value_bits}, {levels} weights and {self.cohort} updates in a sum"
                f"{noise} need {bits} bits, and secagg.bits is {self.bits}: take fewer value_bits, levels or "
                "updates"
            )

    def to_json(self) -> dict[str, Any]:
        """As plain values. Without a plan they are those of older releases, and have their digest."""
        words = {**asdict(self), "weights": list(self.weights), "keepers": list(self.keepers)}
        return words if self.plan else {name: value for name, value in words.items() if name != "plan"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Terms:
        """The inverse, of what somebody else has said. Raises `ConfigError`."""
        try:
            counts = {name: int(data[name]) for name in COUNTS}
            made = cls(
                clip=float(data["clip"]),
                weights=tuple(map(int, data["weights"])),
                keepers=tuple(map(str, data["keepers"])),
                noise=float(data["noise"]),
                plan=str(data.get("plan", "")),
                **counts,
            )
            made.check()
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:  # numbers of any size may come
            raise ConfigError(f"the terms of masked sums cannot be read: {error!r}") from None
        return made

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the terms: JSON, sorted keys, no spaces."""
        return hashlib.sha256(canonical(self.to_json())).hexdigest()


def weights_of(function: Callable[[float], float], levels: int, steepest: int = STEEPEST) -> tuple[int, ...]:
    """The whole weights of a staleness function, up to where they no longer change.

    None is less than the largest by `steepest`: it is that then. 0: they are as the function has them.
    """
    found = [whole_weight(levels, function(float(tau))) for tau in range(STALENESS_MAX)]
    least = -(-max(found) // steepest) if steepest else 1
    found = [max(least, weight) for weight in found]
    while len(found) > 1 and found[-1] == found[-2]:
        found.pop()
    return tuple(found)


def _bits(count: int) -> int:
    """ceil(log2(count))."""
    return (count - 1).bit_length()
