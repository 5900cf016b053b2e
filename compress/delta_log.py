"""The shared delta log: one replica for all devices, whatever version each of them has.

| symbol | name          | meaning                                                            |
|--------|---------------|--------------------------------------------------------------------|
| w      | vector        | the server's model                                                 |
| p_v    | replica       | what every device has of version v                                 |
| e      | exponent      | the unit of a message is 2^e                                       |
| q      | levels        | whole numbers                                                      |

    d = w - p                       what devices lack, the rounding of all earlier messages included
    2^e ~ step * rms(d)             for each group of the layout
    q = sign(d) floor(|d| / 2^e + 0.4)
    p <- p + q 2^e

All p lie on one grid of powers of two and stay below 2^24 of its units, so float32 adds them exactly: in any
order, squashed into one message or one by one, on any machine, the same bits come out, and subtracting
goes back. That is error feedback on the downlink without any state for a device: w - p is the error.
The small group (biases, norms) gets a finer unit: its few numbers matter more than they weigh.

Sources: EF21-P (Gruntkowska et al.) and the hidden state of QAFeL (arXiv 2308.00263) have p; the
grid, the log and the dead zone of 0.6 are ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from anabranch.compress.grid import (
    EXPONENT_MAX,
    EXPONENT_MIN,
    LEVEL_MAX,
    Grid,
    read_message,
    write_message,
)
from anabranch.compress.layout import MAIN, Layout
from anabranch.core.errors import ConfigError
from anabranch.core.params import ParamSpec, Vector

ROUND = 0.4  # 1 - theta: a move of less than 0.6 units waits
FINER = 3  # binary places that the small group has more
FIRST_PLACES = 10  # binary places of version 0, below its largest magnitude
HEADROOM = 3  # binary places that a magnitude may grow before the grid gets coarser
MANTISSA = 24
LOG_BYTES_PER_VALUE = 8  # the log may take as much memory as two models
CACHED_SIZE_MAX = 1 << 18  # messages of larger models are decoded each time


@dataclass(frozen=True)
class DeltaLogState:
    """`replica` is p, float32 (size,), of `version`.

    `entries[i]` are the bytes of the message that leads to version `first + i + 1`, as uint8. For each
    group: `floor` is the exponent that no message may go below, `finest` the lowest that was used,
    so p is a whole multiple of 2^finest.
    """

    replica: Vector
    version: int
    first: int
    floor: list[int]
    finest: list[int]
    entries: list[npt.NDArray[np.uint8]] = field(default_factory=list)


class DeltaLog:
    """A `Broadcast`; see the module. Computes in float32, for a float64 model too.

    `step` is the unit in root mean squares of what devices lack; `versions_max` bounds the log. Raises
    `ConfigError`.
    """

    state_type: ClassVar[type[Any]] = DeltaLogState

    def __init__(self, spec: ParamSpec, step: float = 1.0, versions_max: int = 128) -> None:
        if not 0 < step <= 2:
            raise ConfigError(f"downlink.codec log({step:g}): the step must be in (0, 2]")
        if versions_max < 1:
            raise ConfigError(f"downlink.codec log: the log must hold at least 1 version, not {versions_max}")
        self.spec, self.step, self.versions_max = spec, step, versions_max
        self.layout = Layout.of(spec)

    def init(self, vector: Vector) -> DeltaLogState:
        """Version 0, rounded to the grid."""
        return self._lineage(0, np.asarray(vector, np.float32))

    def publish(
        self, state: DeltaLogState, version: int, vector: Vector, needed: Collection[int]
    ) -> DeltaLogState:
        """One message more; the oldest go where the log is long or dearer than a snapshot."""
        w = np.asarray(vector, np.float32)
        grids = self._message(state, w)
        replica = self._moved(state.replica, grids)
        finest = [
            min(f, g.exponent) if g.levels.any() else f for f, g in zip(state.finest, grids, strict=True)
        ]
        if not self._fits(replica, finest):
            return self._lineage(version, w)
        entry = np.frombuffer(write_message(grids, self.layout), np.uint8)
        entries = [*state.entries, entry]
        surplus = self._surplus(entries, state.first, needed)
        return DeltaLogState(replica, version, state.first + surplus, state.floor, finest, entries[surplus:])

    def replica(self, state: DeltaLogState, version: int) -> Vector | None:
        """P of a version that the log leads from, by going back; None for others."""
        p = self.replica32(state, version)
        return None if p is None else p.astype(self.spec.vector_dtype, copy=False)

    def replica32(self, state: DeltaLogState, version: int) -> Vector | None:
        """The same in float32."""
        if not state.first <= version <= state.version:
            return None
        p = state.replica
        for entry in reversed(state.entries[version - state.first :]):
            p = self._moved(p, self._grids(entry), back=True)
        return p

    def squash(self, state: DeltaLogState, version: int, holds: int) -> bytes:
        """One message for all that lead from `holds` to `version`; both must be in the log."""
        start, stop = holds - state.first, version - state.first
        messages = [self._grids(entry) for entry in state.entries[start:stop]]
        return write_message([_sum(parts) for parts in zip(*messages, strict=True)], self.layout)

    def snapshot(self, state: DeltaLogState, replica: Vector) -> bytes:
        """A whole replica as one message, from nothing."""
        grids = [
            Grid(np.rint(np.ldexp(group.gather(replica).astype(np.float64), -e)).astype(np.int64), e)
            for group, e in zip(self.layout.groups, state.finest, strict=True)
        ]
        return write_message(grids, self.layout)

    def apply(self, held: Vector, message: bytes | memoryview) -> Vector:
        """The float32 vector after a message; a new array. Raises `InvalidUpdate` or `TooLarge`."""
        return self._moved(held, read_message(message, self.layout))

    def _message(self, state: DeltaLogState, w: Vector) -> list[Grid]:
        grids = []
        for group, floor in zip(self.layout.groups, state.floor, strict=True):
            d = group.gather(w) - group.gather(state.replica)
            rms = math.sqrt(float(np.einsum("i,i->", d, d, dtype=np.float64)) / d.size)
            finer = 0 if group.name == MAIN else FINER
            e = floor if rms == 0 else max(floor, round(math.log2(self.step * rms)) - finer)
            levels = np.minimum(np.floor(np.ldexp(np.abs(d), -e) + np.float32(ROUND)), LEVEL_MAX)
            levels = levels.astype(np.int64)
            grids.append(Grid(np.where(d < 0, -levels, levels), e))
        return grids

    def _moved(self, p: Vector, grids: Sequence[Grid], back: bool = False) -> Vector:
        out = p.copy()
        for group, grid in zip(self.layout.groups, grids, strict=True):
            values = grid.values().astype(np.float32)
            at = 0
            for start, stop in group.runs:
                part = values[at : at + stop - start]
                out[start:stop] += -part if back else part
                at += stop - start
        return out

    def _fits(self, replica: Vector, finest: Sequence[int]) -> bool:
        """Whether every sum on the way here and from here is exact."""
        return all(
            float(np.abs(group.gather(replica)).max()) < 2.0 ** (MANTISSA + e)
            for group, e in zip(self.layout.groups, finest, strict=True)
        )

    def _lineage(self, version: int, w: Vector) -> DeltaLogState:
        """A grid that fits w, and no log: devices need a snapshot."""
        replica, floor, finest = w.copy(), [], []
        for group in self.layout.groups:
            values = group.gather(w)
            top = math.ceil(math.log2(max(float(np.abs(values).max()), 2.0 ** (EXPONENT_MIN + 30))))
            floor.append(max(EXPONENT_MIN, min(top + HEADROOM - MANTISSA, EXPONENT_MAX)))
            finest.append(max(floor[-1], top - FIRST_PLACES))
            # Adding 0 makes -0 of what rounds to nothing 0, as the devices decode it.
            group.scatter(np.ldexp(np.rint(np.ldexp(values, -finest[-1])), finest[-1]) + 0.0, replica)
        return DeltaLogState(replica, version, version, floor, finest)

    def _surplus(self, entries: Sequence[npt.NDArray[np.uint8]], first: int, needed: Collection[int]) -> int:
        """How many of the oldest entries may go."""
        surplus = max(0, len(entries) - self.versions_max)
        oldest = min(needed, default=first + len(entries))
        total = sum(entry.size for entry in entries[surplus:])
        while (
            total > LOG_BYTES_PER_VALUE * self.spec.size
            and first + surplus < oldest
            and surplus < len(entries) - 1
        ):
            total -= entries[surplus].size
            surplus += 1
        return surplus

    def _grids(self, entry: npt.NDArray[np.uint8]) -> list[Grid]:
        if self.layout.size > CACHED_SIZE_MAX:
            return read_message(entry.data, self.layout)
        return _cached(entry.tobytes(), self.layout)


@lru_cache(maxsize=64)
def _cached(entry: bytes, layout: Layout) -> list[Grid]:
    return read_message(entry, layout)


def _sum(grids: Sequence[Grid]) -> Grid:
    """The sum of messages of one group, in the finest of their units."""
    e = min(grid.exponent for grid in grids)
    return Grid(sum((g.levels << (g.exponent - e) for g in grids), np.zeros_like(grids[0].levels)), e)
