"""The shared delta log: one replica for all devices, whatever version each of them has.

| symbol | name          | meaning                                                            |
|--------|---------------|--------------------------------------------------------------------|
| w      | vector        | the server's model                                                 |
| p_v    | replica       | what every device has of version v                                 |
| e      | exponent      | the unit of a message is 2^e                                       |
| q      | levels        | whole numbers                                                      |
| f      | floor         | no e is below it: all p are whole multiples of 2^f                 |

    d = w - p                       what devices lack, the rounding of all earlier messages included
    2^e ~ step * rms(d)             for each group of the layout, e >= f; half of that where all q were 0
    q = sign(d) floor(|d| / 2^e + 0.4)
    p <- p + q 2^e

All p of a lineage lie on one grid, 2^f, and stay below 2^23 of its units, so any two of them differ by
less than 2^24: float32 has every p and every difference exactly. In any order, squashed into one message
or one by one, on any machine, the same bits come out, and subtracting goes back. A model that outgrows
its grid starts a new lineage on a coarser one. That is error feedback on the downlink without any state
for a device: w - p is the error. The small group (biases, norms) gets a finer unit: a rounding there
moves a whole channel, and its few numbers cost next to nothing. Buffers (`core/engine/buffers.py`) are on no
grid: p has them as w does, in float32, and a message flips the bits that differ: exact both ways, too.

Sources: EF21-P (Gruntkowska et al.) and the hidden state of QAFeL (arXiv 2308.00263) have p; the
grid, the log and the dead zone of 0.6 are ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from anabranch.compress.grid import (
    EXPONENT_MIN,
    LEVEL_MAX,
    Flips,
    Grid,
    Message,
    bits_of,
    read_message,
    write_message,
)
from anabranch.compress.layout import MAIN, Layout
from anabranch.compress.recent import Recent
from anabranch.core.errors import ConfigError, InvalidUpdate
from anabranch.core.kernels.chosen import loops
from anabranch.core.model.arrays import inner
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.submodels import TensorSet, UnitMap
from anabranch.core.rules import NEWEST

Entry = npt.NDArray[np.uint8]

ROUND = 0.4  # 1 - theta: a move of less than 0.6 units waits
FINER = 3  # binary places that the small group has more
FIRST_PLACES = 10  # binary places of the first version of a lineage, below its largest magnitude
HEADROOM = 3  # binary places that a magnitude may grow before the grid gets coarser
MAGNITUDE = 23  # |p| < 2^(23 + f)
PLACES = range(4, MAGNITUDE - HEADROOM + 1)  # that may be asked for in the place of `FIRST_PLACES`
LARGEST, SMALLEST = 2.0**80, 2.0**-70  # magnitudes beyond are brought within
LOG_BYTES_PER_VALUE = 8  # the log may take as much memory as two models
RECENT_BYTES_MAX = 64 << 20  # of replicas that are remembered rather than rebuilt


@dataclass(frozen=True)
class DeltaLogState:
    """`replica` is p, float32 (size,), of `version`, the newest that was published.

    `entries[i]` are the bytes, as uint8, of the message that leads to version `first + (i + 1) * every` from
    the one before. `floor` is f, for each group. `kept` has replicas, by version as text, that the log does
    not lead to any more and tasks still train from.
    """

    replica: Vector
    version: int
    first: int
    floor: list[int]
    entries: list[Entry] = field(default_factory=list)
    kept: dict[str, Vector] = field(default_factory=dict)


class DeltaLog:
    """A `Broadcast`; see the module. Computes in float32, for a float64 model too.

    `step` is the unit in root mean squares of what devices lack; `versions_max` bounds the messages of the
    log; `keeps_replicas`: the strategy mixes models, so no base of a live task may get lost. Of the server's
    versions each `every`-th is published. `places` are those of a lineage's first version, below its largest
    magnitude: with fewer a snapshot is shorter, and more is left to the messages. `rules`: the run's
    (`core/rules.py`). Raises `ConfigError`.
    """

    state_type: ClassVar[type[Any]] = DeltaLogState

    def __init__(
        self,
        spec: ParamSpec,
        step: float = 1.0,
        versions_max: int = 128,
        keeps_replicas: bool = False,
        every: int = 1,
        places: int = FIRST_PLACES,
        rules: int = NEWEST,
    ) -> None:
        if not 0 < step <= 2:
            raise ConfigError(f"downlink.codec log({step:g}): the step must be in (0, 2]")
        if versions_max < 1:
            raise ConfigError(f"downlink.codec log: the log must hold at least 1 version, not {versions_max}")
        if places not in PLACES:
            raise ConfigError(
                f"downlink.codec log: the binary places of its first version must be from {PLACES.start} to "
                f"{PLACES.stop - 1}, not {places}"
            )
        self.spec, self.step, self.versions_max, self.places = spec, step, versions_max, places
        self.keeps_replicas, self.every, self.rules = keeps_replicas, every, rules
        self.layout = Layout.of(spec)
        self._recent = Recent[tuple[Entry, Vector]](RECENT_BYTES_MAX)

    def init(self, vector: Vector) -> DeltaLogState:
        """Version 0, rounded to the grid."""
        return self._lineage(0, _bounded(vector))

    def first_replica(self, vector: Vector) -> Vector:
        """P of version 0, shape (size,): the same whatever the step."""
        return self.init(vector).replica.astype(self.spec.vector_dtype, copy=False)

    def publish(
        self, state: DeltaLogState, version: int, vector: Vector, needed: Collection[int]
    ) -> DeltaLogState:
        """One message more, if it is time; the oldest go where the log is long or takes much memory."""
        if version - state.version < self.every:
            return state
        w = _bounded(vector)
        needed = needed if self.keeps_replicas else ()
        message = self._message(state, w)
        replica = moved(state.replica, message, self.layout)
        if not self._fits(replica, state.floor):
            return self.restart(state, version, vector, needed)
        entries = [*state.entries, np.frombuffer(write_message(message, self.layout), np.uint8)]
        surplus = self._surplus(entries, state.first, needed)
        first = state.first + surplus * self.every
        self._remember(version, entries[-1], replica)
        kept = self._kept(state, first, needed)
        return DeltaLogState(replica, version, first, state.floor, entries[surplus:], kept)

    def restart(
        self, state: DeltaLogState, version: int, vector: Vector, needed: Collection[int]
    ) -> DeltaLogState:
        """A new lineage. One message would leave a good part of a large step to later ones."""
        needed = needed if self.keeps_replicas else ()
        fresh = self._lineage(version, _bounded(vector))
        return replace(fresh, kept=self._kept(state, version, needed))

    def offered(self, state: DeltaLogState, version: int) -> int:  # noqa: ARG002 - the log's own counts
        """The newest that was published."""
        return state.version

    def place(self, state: DeltaLogState, version: int) -> int | None:
        """How many messages of the log lead to a version; None where it is not in the log."""
        place, between = divmod(version - state.first, self.every)
        return place if 0 <= place <= len(state.entries) and not between else None

    def replica(self, state: DeltaLogState, version: int) -> Vector | None:
        """P of a version that the log leads from, by going back, or that was kept; None for others."""
        p = self.replica32(state, version)
        return None if p is None else p.astype(self.spec.vector_dtype, copy=False)

    def replica32(self, state: DeltaLogState, version: int) -> Vector | None:
        """The same in float32."""
        if self.place(state, version) is None:
            return state.kept.get(str(version))
        return next(self.replicas_back(state, [version]))

    def replicas_back(self, state: DeltaLogState, versions: Iterable[int]) -> Iterator[Vector]:
        """P in float32 of each of these versions, none above the one before it; all must be in the log.

        One pass back through the log. It holds one replica at a time and does not write on it.
        """
        start, p = len(state.entries), state.replica
        for version in versions:
            place = self.place(state, version)
            assert place is not None, "the version is in the log"
            known = ((n, q) for n in range(place, start) if (q := self._remembered(state, n)) is not None)
            start, p = next(known, (start, p))
            for entry in reversed(state.entries[place:start]):
                p = moved(p, read_message(entry.data, self.layout), self.layout, back=True)
            if 0 < place < start:
                self._remember(version, state.entries[place - 1], p)
            start = place
            yield p

    def squash(self, state: DeltaLogState, version: int, holds: int) -> bytes:
        """One message for all that lead from `holds` to `version`; both must be in the log.

        The sum of the messages between is the difference of the replicas, to the bit.
        """
        new, old = self.replica32(state, version), self.replica32(state, holds)
        assert new is not None, "the version is in the log"
        assert old is not None, "the version that the device holds is in the log"
        return self.step_between(new, old, state.floor)

    def snapshot(self, state: DeltaLogState, version: int) -> bytes:
        """A whole replica as one message, from nothing; the version must be in the log."""
        replica = self.replica32(state, version)
        assert replica is not None, "the version is in the log"
        return self.step_between(replica, np.zeros_like(replica), state.floor)

    def step_between(
        self, new: Vector, old: Vector, floor: Sequence[int], part: UnitMap | TensorSet | None = None
    ) -> bytes:
        """One message that leads from a float32 vector, which may be zero, to another; or of a part of both.

        `floor` is the lineage's, for each group of the whole model.
        """
        layout = Layout.of(self.spec, part)
        floors = {group.name: f for group, f in zip(self.layout.groups, floor, strict=True)}
        values = new - old
        grids = [Grid.of(group.gather(values), floors[group.name]) for group in layout.groups]
        return write_message(Message(grids, _flips(new, old, layout)), layout)

    def _message(self, state: DeltaLogState, w: Vector) -> Message:
        grids = []
        for group, floor in zip(self.layout.groups, state.floor, strict=True):
            d = np.empty(group.size, np.float32)
            for part, new, old in zip(group.cut(d), group.parts(w), group.parts(state.replica), strict=True):
                np.subtract(new, old, out=part)
            rms = math.sqrt(inner(d, d) / d.size)
            finer = 0 if group.name == MAIN else FINER
            e = floor if rms == 0 else max(floor, round(math.log2(self.step * rms)) - finer)
            grid = _rounded(d, e)
            if self.rules and e > floor and not grid.levels.any():
                # The largest is the root mean square at least, so that of half the unit it has a level.
                grid = _rounded(d, e - 1)
            grids.append(grid)
        return Message(grids, _flips(w, state.replica, self.layout))

    def _fits(self, replica: Vector, floor: Sequence[int]) -> bool:
        """Whether p is below 2^23 units of its grid."""
        for group, f in zip(self.layout.groups, floor, strict=True):
            bound = 2.0 ** (MAGNITUDE + f)
            if not all(_largest(p) < bound for p in group.parts(replica)):
                return False
        return True

    def _lineage(self, version: int, w: Vector) -> DeltaLogState:
        """A grid that fits w, and no log: devices need a snapshot."""
        replica, floor, least = w.copy(), [], SMALLEST
        for group in self.layout.groups:
            values = group.gather(w)
            largest = float(np.abs(values).max())
            # Biases start from zero: they get room to grow to the size of the weights, which come first.
            least = max(least, largest)
            f = max(EXPONENT_MIN, math.ceil(math.log2(least)) + HEADROOM - MAGNITUDE)
            # Few numbers, and a rounding there moves a whole channel: those are never coarser.
            places = self.places if group.name == MAIN else max(self.places, FIRST_PLACES)
            unit = 2.0 ** max(f, math.ceil(math.log2(max(largest, SMALLEST))) - places)
            rounded = np.rint(values * np.float32(1 / unit)) * np.float32(unit)
            group.scatter(rounded + np.float32(0.0), replica)  # whole numbers have no -0.0
            floor.append(f)
        return DeltaLogState(replica, version, version, floor)

    def _surplus(self, entries: Sequence[Entry], first: int, needed: Collection[int]) -> int:
        """How many of the oldest entries may go."""
        surplus = max(0, len(entries) - self.versions_max)
        oldest = min(needed, default=first + len(entries) * self.every)
        total = sum(entry.size for entry in entries[surplus:])
        while (
            total > LOG_BYTES_PER_VALUE * self.spec.size
            and first + surplus * self.every < oldest
            and surplus < len(entries) - 1
        ):
            total -= entries[surplus].size
            surplus += 1
        return surplus

    def _kept(self, state: DeltaLogState, first: int, needed: Collection[int]) -> dict[str, Vector]:
        """The replicas of needed versions that a log from `first` on does not lead to."""
        pairs = ((v, self.replica32(state, v)) for v in sorted(needed) if v < first)
        return {str(v): p for v, p in pairs if p is not None}

    def _remember(self, version: int, entry: Entry, replica: Vector) -> None:
        self._recent.put(version, (entry, replica), replica.nbytes)

    def _remembered(self, state: DeltaLogState, place: int) -> Vector | None:
        """P where it is remembered from this very log: the entry that led to it is the same object."""
        found = self._recent.get(state.first + place * self.every)
        if found is None or place == 0:
            return None
        return found[1] if found[0] is state.entries[place - 1] else None


def apply(held: Vector, message: bytes | memoryview, layout: Layout) -> Vector:
    """The float32 vector after a message; a new array. Raises `InvalidUpdate` or `TooLarge`."""
    read = read_message(message, layout)
    with np.errstate(over="ignore"):
        out = moved(held, read, layout)
    if not np.isfinite(out).all():
        raise InvalidUpdate("a message of the delta log leads to values that are not finite")
    return out


def moved(p: Vector, message: Message, layout: Layout, back: bool = False) -> Vector:
    """P + q 2^e, or p - q 2^e on the way back; a new array."""
    out = p.copy()
    if layout.exact.size:
        layout.exact.scatter((bits_of(layout.exact.gather(p)) ^ message.flips).view(np.float32), out)
    for group, grid in zip(layout.groups, message.grids, strict=True):
        unit, at = 2.0**grid.exponent, 0
        for where in group.pieces(0, group.size):
            size = where.stop - where.start
            loops.add_levels(out[where], -unit if back else unit, grid.levels[at : at + size])
            at += size
    return out


def _flips(new: Vector, old: Vector, layout: Layout) -> Flips:
    """The bits of buffers that differ."""
    return bits_of(layout.exact.gather(new)) ^ bits_of(layout.exact.gather(old))


def _rounded(d: Vector, exponent: int) -> Grid:
    """The levels of differences."""
    found = np.empty(d.size, np.int32)
    loops.to_levels(d, 2.0**-exponent, ROUND, LEVEL_MAX, found)
    return Grid(found, exponent)


def _largest(values: Vector) -> float:
    """The largest magnitude of float32 values (n,): 0 of none, and none where one is not a number."""
    return float(np.array(loops.top(values), np.uint32).view(np.float32))


def _bounded(vector: Vector) -> Vector:
    """W in float32; what is not finite, or too large for a grid, is brought within."""
    with np.errstate(over="ignore"):
        w = np.asarray(vector, np.float32)
    if _largest(w) <= LARGEST:
        return w
    return np.clip(np.nan_to_num(w, nan=0.0), -LARGEST, LARGEST)
