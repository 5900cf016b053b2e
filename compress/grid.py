"""Whole multiples of a power of two, as bytes: what the shared delta log is made of.

A message has, for each group of the layout, an exponent e and integers q, (n,): it stands for q 2^e. It
is written sparse (byte gaps, signs, magnitudes) or dense (zigzag numbers, a stream for each of their
bytes), whichever is smaller; the first byte says which, the rest is `wire.py`. Behind it is the change of the
buffers, which are on no grid: for each the bits of float32 that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from anabranch.compress import wire
from anabranch.compress.entropy import Huffman, Zstd
from anabranch.compress.indices import Gaps
from anabranch.compress.layout import Layout
from anabranch.compress.levels import levels_max, read_levels, write_levels
from anabranch.compress.stage import Coded, Role, Stage, StageContext, Stream, StreamStage, take
from anabranch.core.errors import InvalidUpdate
from anabranch.core.kernels.chosen import loops
from anabranch.core.model.arrays import Vector, from_bytes, to_bytes

EXPONENT_MIN, EXPONENT_MAX = -100, 100  # 2^e is a normal float32, and so is every level of it
LEVEL_MAX = 1 << 24  # up to here float32 has every whole number
PLANES = (Role.PLANE_0, Role.PLANE_1, Role.PLANE_2, Role.PLANE_3)
Integers = npt.NDArray[np.int32]
Flips = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Grid:
    """One group of a message: `levels` (n,), at most `LEVEL_MAX`, and the exponent of their unit."""

    levels: Integers
    exponent: int

    @classmethod
    def of(cls, values: Vector, floor: int) -> Grid:
        """Values (n,) that are whole multiples of 2^floor, in the coarsest unit that has them all.

        So the levels follow from the values alone, whichever grid these have been on.
        """
        levels = (values * np.float32(2.0**-floor)).astype(np.int32)
        bits = int(np.bitwise_or.reduce(levels))
        spare = (bits & -bits).bit_length() - 1 if bits else 0
        return cls(levels >> spare, floor + spare)

    def values(self, start: int = 0, stop: int | None = None) -> Vector:
        """Levels * 2^exponent in float32, exact; of all, or of some."""
        found: Vector = self.levels[start:stop].astype(np.float32)
        found *= np.float32(2.0**self.exponent)
        return found


class _Levels(StreamStage):
    """A `Grid` in, streams out. Only messages of the log have these stages, no chain does."""

    accepts: ClassVar[tuple[type[Any], ...]] = (Grid,)


class SparseLevels(_Levels):
    """Those that are not zero, with their indices."""

    name: ClassVar[str] = "sparse"
    number: ClassVar[int] = 40

    def raw_max(self, k: int, n: int) -> int:
        return 4 + levels_max(k)

    def encode(self, grid: Grid, context: StageContext) -> Coded:
        indices = np.flatnonzero(grid.levels)
        coded = Coded(indices.size, indices=indices)
        _write_exponent(coded, grid.exponent)
        write_levels(coded, grid.levels[indices])
        return coded

    def decode(self, coded: Coded, context: StageContext) -> Grid:
        assert coded.indices is not None, "the gaps come before"
        found = read_levels(coded)
        if found.size and int(np.abs(found).max()) > LEVEL_MAX:
            raise InvalidUpdate(f"a level is over {LEVEL_MAX}")
        levels = np.zeros(context.n, np.int32)
        levels[coded.indices] = found
        return Grid(levels, _read_exponent(coded))


class DenseLevels(_Levels):
    """All of them: zigzag (0, -1, 1, -2, ... as 0, 1, 2, 3, ...), one stream for each byte."""

    name: ClassVar[str] = "dense"
    number: ClassVar[int] = 41

    def raw_max(self, k: int, n: int) -> int:
        return 4 + len(PLANES) * n

    def encode(self, grid: Grid, context: StageContext) -> Coded:
        coded = Coded(context.n)
        _write_exponent(coded, grid.exponent)
        levels = grid.levels
        top = max(2 * int(levels.max()), -2 * int(levels.min()) - 1, 0) if levels.size else 0
        planes = np.empty((max(1, (top.bit_length() + 7) // 8), levels.size), np.uint8)
        loops.to_planes(levels, planes)
        for role, plane in zip(PLANES, planes, strict=False):
            coded.streams[role] = Stream.of(plane.data)
        return coded

    def decode(self, coded: Coded, context: StageContext) -> Grid:
        if coded.k != context.n:
            raise InvalidUpdate(f"payload has {coded.k} levels, the manifest needs {context.n}")
        planes = np.zeros((context.n, 4), np.uint8)
        for i, role in enumerate(PLANES):
            if role in coded.streams:
                planes[:, i] = np.frombuffer(take(coded, role, context.n), np.uint8)
        folded = planes.reshape(-1).view("<u4")
        if folded.size and int(folded.max()) > 2 * LEVEL_MAX:
            raise InvalidUpdate(f"a level is over {LEVEL_MAX}")
        levels = (folded >> 1).astype(np.int32) ^ -(folded & 1).astype(np.int32)
        return Grid(levels, _read_exponent(coded))


# The streams of a sparse message differ: matches help gaps, not magnitudes. zstd takes what it can.
FORMS: tuple[tuple[Stage, ...], ...] = (
    (SparseLevels(), Gaps(), Huffman()),
    (SparseLevels(), Gaps(), Zstd()),
    (DenseLevels(), Huffman()),
    (DenseLevels(), Zstd()),
)


@dataclass(frozen=True)
class Message:
    """`grids` of the groups; `flips` (n,) uint32, the bits of buffers that differ: exact both ways."""

    grids: Sequence[Grid]
    flips: Flips


def bits_of(values: Vector) -> Flips:
    """The bits of float32 values."""
    found: Flips = values.astype(np.float32).view(np.uint32)
    return found


def write_message(message: Message, layout: Layout) -> bytes:
    """The smallest form of a message."""
    grids = message.grids
    filled = sum(np.count_nonzero(grid.levels) for grid in grids) / max(1, layout.size)
    forms = [i for i, form in enumerate(FORMS) if isinstance(form[0], SparseLevels) == (filled < 0.3)]
    shared = FORMS[forms[0]][:-1]  # they differ in their coder alone
    coded = [_through(shared, grid, g.size) for g, grid in zip(layout.groups, grids, strict=True)]
    return min((_write(i, coded, layout) for i in forms), key=len) + to_bytes(message.flips)


def read_message(data: bytes | memoryview, layout: Layout) -> Message:
    """The inverse. Raises `InvalidUpdate` or `TooLarge`."""
    view, end = memoryview(data), len(data) - 4 * layout.exact.size
    if end <= 0 or view[0] >= len(FORMS):
        raise InvalidUpdate("payload is not a message of the delta log")
    stages, flips = FORMS[view[0]], from_bytes(view[end:], "uint32", (layout.exact.size,))
    grids = []
    for group, part in zip(
        layout.groups, wire.read(view[1:end], layout, [stages] * len(layout.groups)), strict=True
    ):
        value: Any = part.coded
        for stage in reversed(stages):
            value = stage.decode(value, StageContext(group.size))
        if part.coded.streams:
            raise InvalidUpdate("payload has streams that its codec does not know")
        grids.append(value)
    return Message(grids, flips)


def message_bytes_max(layout: Layout) -> int:
    """More bytes than this cannot be a message."""
    groups = sum(max(wire.bytes_max(form, g.size) for form in FORMS) for g in layout.groups)
    return 1 + wire.HEAD.size + wire.CRC.size + groups + 4 * layout.exact.size


def _through(stages: tuple[Stage, ...], grid: Grid, size: int) -> Coded:
    """What comes out of some stages, the first of which takes a grid."""
    value: Any = grid
    for stage in stages:
        value = stage.encode(value, StageContext(size))
    coded: Coded = value
    return coded


def _write(form: int, coded: Sequence[Coded], layout: Layout) -> bytes:
    """A message through the coder of a form, from what its other stages have made."""
    parts = []
    for group, made in zip(layout.groups, coded, strict=True):
        own = Coded(made.k, dict(made.streams))  # a coder puts its streams in the place of those it gets
        parts.append(wire.WireGroup(FORMS[form], FORMS[form][-1].encode(own, StageContext(group.size))))
    return bytes([form]) + wire.write(parts, layout)


def _write_exponent(coded: Coded, exponent: int) -> None:
    coded.streams[Role.STEP] = Stream.of(np.array([exponent], "<i4").tobytes())


def _read_exponent(coded: Coded) -> int:
    exponent = int(np.frombuffer(take(coded, Role.STEP, 4), "<i4")[0])
    if not EXPONENT_MIN <= exponent <= EXPONENT_MAX:
        raise InvalidUpdate(f"the exponent {exponent} is not within {EXPONENT_MIN}..{EXPONENT_MAX}")
    return exponent
