"""Selection and values in one: levels of one step for the whole group, the smallest dropped.

    q = sign(x) floor(abs(x) / s + 1 - theta)         theta = 0.6; what is zero does not travel

`deadzone(rho)` chooses s so that about the fraction rho survives: the least of the ceil(rho n) largest
magnitudes is theta s. `deadzone(step,s)` has s itself, and keeps as many as there are. One step for all
is reverse water-filling: small layers get few bits, not as many as large ones. The error of a value is
at most 0.6 s.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from anabranch.compress.levels import levels_max, read_levels, write_levels
from anabranch.compress.selectors import kept_count, largest, over
from anabranch.compress.stage import Coded, Dense, Role, Sparse, StageContext, Stream, take
from anabranch.core.errors import InvalidUpdate

THETA = 0.6
LEVELS_MAX = 1 << 22
STEP_MIN = 1e-30  # under this a step would not be a normal number


class DeadZone:
    """Levels of one step for a whole group: what is nearer to 0 than theta steps does not travel.

    The levels are streams of `levels.py`.
    """

    name: ClassVar[str] = "deadzone"
    number: ClassVar[int] = 14
    version: ClassVar[int] = 1
    accepts: ClassVar[tuple[type[Any], ...]] = (Dense,)

    def __init__(self, rho: float = 1.0, step: float | None = None) -> None:
        self.rho, self.step = rho, step

    def emits(self, accepted: type[Any]) -> type[Any]:
        return Coded

    def values_max(self, n: int) -> int:
        return kept_count(self.rho, n)

    def raw_max(self, k: int, n: int) -> int:
        return 4 + levels_max(k)

    def encode(self, value: Dense, context: StageContext) -> Coded:
        if self.step is None:
            found = largest(value, kept_count(self.rho, context.n))
        else:
            found = over(value, int(np.array(self.step * THETA, np.float32).view(np.int32)))
        magnitudes = np.abs(found.values)
        step = self._step(float(magnitudes.min(initial=np.inf)), float(magnitudes.max(initial=0)))
        magnitudes /= step
        magnitudes += np.float32(1 - THETA)
        np.floor(magnitudes, out=magnitudes)
        np.copysign(magnitudes, found.values, out=magnitudes)
        levels, indices = magnitudes.astype(np.int32), found.indices
        if not levels.all():
            alive = np.flatnonzero(levels)
            levels, indices = levels[alive], indices[alive]
        coded = Coded(levels.size, indices=indices)
        coded.streams[Role.STEP] = Stream.of(np.array([step], "<f4").tobytes())
        write_levels(coded, levels)
        return coded

    def decode(self, coded: Coded, context: StageContext) -> Sparse:
        if coded.indices is None:
            raise InvalidUpdate("payload of levels without indices")
        (step,) = np.frombuffer(take(coded, Role.STEP, 4), "<f4")
        if not (np.isfinite(step) and step > 0):
            raise InvalidUpdate("the step must be finite and positive")
        with np.errstate(over="ignore"):
            values = read_levels(coded).astype(np.float32) * step
        if not np.isfinite(values).all():
            raise InvalidUpdate("payload has levels that are not of finite values")
        return Sparse(coded.indices, values)

    def _step(self, least: float, most: float) -> np.float32:
        """So that the least survives, and levels are exact in float32."""
        wanted = least / THETA if self.step is None else self.step
        return np.float32(max(min(wanted, most), most / LEVELS_MAX, STEP_MIN))
