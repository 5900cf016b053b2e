"""Stages that make bytes of values: as they are, bf16, block integers, dead-zone levels.

| stage              | a value takes      | scale                                    | error                |
|--------------------|--------------------|------------------------------------------|----------------------|
| f32                | 32 bits            |                                          | none                 |
| bf16               | 16 bits            |                                          | 2^-9 relative        |
| int8(B), int8(B,sr)| 8 bits + 16/B      | s = max abs(x) / 127 of a block of B     | s/2 nearest, s random |
| int4(B), int4(B,sr)| 4 bits + 16/B      | s = max abs(x) / 7                       | s/2 nearest, s random |
| deadzone(rho)      | by entropy         | one step s for the group                 | below 0.6 s          |

`sr` rounds at random, without bias. Block scales are bf16, rounded up, so that codes stay in range.
`deadzone` is q = sign(x) floor(abs(x)/s + 1 - theta) with theta = 0.6 and zeros dropped; s is chosen so that
the fraction rho survives. One step for the whole group is reverse water-filling: small layers get
few bits, not the same as large ones.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from anabranch.compress.levels import levels_max, read_levels, write_levels
from anabranch.compress.selectors import kept_count, largest, read_seed, write_seed
from anabranch.compress.stage import Coded, Context, Dense, Role, Sparse, Stream, take
from anabranch.core.errors import InvalidUpdate
from anabranch.core.params import Vector

BLOCKS = (32, 64, 128, 256)
TINY = 1e-30  # blocks under this are sent as zeros: their scale would not be a normal number
ROUNDER = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to the nearest integer, in the low bits
THETA = 0.6
LEVELS_MAX = 1 << 22
Codes = npt.NDArray[np.int8]
Bytes = npt.NDArray[np.uint8]


def to_bf16(x: Vector) -> npt.NDArray[np.uint16]:
    """Round float32 to the nearest bf16, ties to even: the upper halves."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype("<u2")


def from_bf16(halves: npt.NDArray[Any]) -> Vector:
    """The float32 of bf16's upper halves."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _bf16_up(scales: Vector) -> Vector:
    bits = scales.view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


class _Quantiser:
    """Dense or sparse in, streams out."""

    name: ClassVar[str]
    number: ClassVar[int]
    version: ClassVar[int] = 1
    accepts: ClassVar[tuple[type[Any], ...]] = (Dense, Sparse)

    def emits(self, accepted: type[Any]) -> type[Any]:
        return Coded

    def values_max(self, n: int) -> int:
        return n

    def encode(self, value: Dense | Sparse, context: Context) -> Coded:
        coded = Coded(value.values.size)
        if isinstance(value, Sparse):
            coded.indices, coded.seed = value.indices, value.seed
        if coded.seed is not None:
            write_seed(coded, coded.seed)
            coded.indices = None
        self._write(value.values, coded, context)
        return coded

    def decode(self, coded: Coded, context: Context) -> Dense | Sparse:
        seed = read_seed(coded) if Role.SEED in coded.streams else None
        values = self._read(coded, context)
        if coded.indices is not None or seed is not None:
            indices = np.empty(0, np.int64) if coded.indices is None else coded.indices
            return Sparse(indices, values, seed)
        return Dense(values)

    def _write(self, values: Vector, coded: Coded, context: Context) -> None:
        raise NotImplementedError

    def _read(self, coded: Coded, context: Context) -> Vector:
        raise NotImplementedError


class Float32(_Quantiser):
    """See the module."""

    name: ClassVar[str] = "f32"
    number: ClassVar[int] = 10

    def raw_max(self, k: int, n: int) -> int:
        return 4 * k

    def _write(self, values: Vector, coded: Coded, context: Context) -> None:
        coded.streams[Role.VALUES] = Stream.of(values.astype("<f4", copy=False).tobytes())

    def _read(self, coded: Coded, context: Context) -> Vector:
        data = take(coded, Role.VALUES, 4 * coded.k)
        return _finite(np.frombuffer(data, "<f4").astype(np.float32, copy=False))


class BFloat16(_Quantiser):
    """See the module."""

    name: ClassVar[str] = "bf16"
    number: ClassVar[int] = 11

    def raw_max(self, k: int, n: int) -> int:
        return 2 * k

    def _write(self, values: Vector, coded: Coded, context: Context) -> None:
        coded.streams[Role.VALUES] = Stream.of(to_bf16(values).tobytes())

    def _read(self, coded: Coded, context: Context) -> Vector:
        return _finite(from_bf16(np.frombuffer(take(coded, Role.VALUES, 2 * coded.k), "<u2")))


class BlockIntegers(_Quantiser):
    """int8 and int4: see the module. The last block may be short."""

    top: ClassVar[int]

    def __init__(self, block: int = 256, stochastic: bool = False) -> None:
        self.block, self.stochastic = block, stochastic

    def raw_max(self, k: int, n: int) -> int:
        return self._packed_len(k) + 2 * -(-k // self.block)

    def _write(self, values: Vector, coded: Coded, context: Context) -> None:
        rows = _in_rows(values, self.block)
        top = np.maximum(rows.max(axis=1), -rows.min(axis=1)) if rows.size else np.empty(0, np.float32)
        scales = _bf16_up(np.where(top < TINY, 0, top / self.top).astype(np.float32))
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        draw = np.random.Generator(np.random.Philox(key=context.seed & 0xFFFFFFFFFFFFFFFF))
        codes = np.empty(rows.shape, np.int8)
        step = max(1, (1 << 15) // self.block)
        scratch = np.empty((step, self.block), np.float32)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            scaled = np.multiply(part, inverse[start : start + step, None], out=scratch[: len(part)])
            if self.stochastic:
                scaled += draw.integers(0, 256, scaled.shape, np.uint8).astype(np.float32) / 256 + np.float32(
                    1 / 512 - 0.5
                )
            scaled += ROUNDER
            codes[start : start + step] = scaled.view(np.int8)[:, ::4]
        coded.streams[Role.CODES] = Stream.of(self._pack(codes.reshape(-1)[: values.size]))
        coded.streams[Role.SCALES] = Stream.of((scales.view(np.uint32) >> 16).astype("<u2").tobytes())

    def _read(self, coded: Coded, context: Context) -> Vector:
        blocks = -(-coded.k // self.block)
        halves = np.frombuffer(take(coded, Role.SCALES, 2 * blocks), "<u2")
        if halves.size and int(halves.max()) >= 0x7F80:  # negative, infinite or not a number
            raise InvalidUpdate("scales must be finite and not negative")
        codes = self._unpack(take(coded, Role.CODES, self._packed_len(coded.k)), coded.k)
        if coded.k and int(codes.min()) < -self.top:
            raise InvalidUpdate(f"codes must be within -{self.top}..{self.top}")
        values = codes.astype(np.float32)
        scales = from_bf16(halves)
        whole = coded.k // self.block * self.block
        rows = values[:whole].reshape(-1, self.block)
        np.multiply(rows, scales[: len(rows), None], out=rows)
        values[whole:] *= scales[-1] if whole < coded.k else np.float32(1)
        return values

    def _packed_len(self, k: int) -> int:
        return k

    def _pack(self, codes: Codes) -> bytes:
        return codes.tobytes()

    def _unpack(self, data: bytes | memoryview, k: int) -> Codes:
        return np.frombuffer(data, np.int8)


class Int8(BlockIntegers):
    """See the module."""

    name: ClassVar[str] = "int8"
    number: ClassVar[int] = 12
    top: ClassVar[int] = 127


class Int4(BlockIntegers):
    """See the module. Two codes a byte, biased by 8: the first of each pair in the low half."""

    name: ClassVar[str] = "int4"
    number: ClassVar[int] = 13
    top: ClassVar[int] = 7

    def _packed_len(self, k: int) -> int:
        return -(-k // 2)

    def _pack(self, codes: Codes) -> bytes:
        biased = (codes + np.int8(8)).view(np.uint8)
        if biased.size % 2:
            biased = np.append(biased, np.uint8(0))
        return (biased[::2] | (biased[1::2] << np.uint8(4))).tobytes()

    def _unpack(self, data: bytes | memoryview, k: int) -> Codes:
        packed = np.frombuffer(data, np.uint8)
        pairs = np.empty((packed.size, 2), np.uint8)
        np.bitwise_and(packed, 15, out=pairs[:, 0])
        np.right_shift(packed, 4, out=pairs[:, 1])
        if k % 2 and pairs[-1, 1]:
            raise InvalidUpdate("the padding of the last code is not zero")
        return pairs.reshape(-1)[:k].view(np.int8) - np.int8(8)


class DeadZone(_Quantiser):
    """See the module. The levels are streams of `levels.py`."""

    name: ClassVar[str] = "deadzone"
    number: ClassVar[int] = 14
    accepts: ClassVar[tuple[type[Any], ...]] = (Dense,)

    def __init__(self, rho: float) -> None:
        self.rho = rho

    def values_max(self, n: int) -> int:
        return kept_count(self.rho, n)

    def raw_max(self, k: int, n: int) -> int:
        return 4 + levels_max(k)

    def encode(self, value: Dense | Sparse, context: Context) -> Coded:
        x = value.values
        chosen = largest(x, kept_count(self.rho, context.n))
        found = np.abs(x[chosen])
        step = self._step(found)
        levels = np.floor(found / step + np.float32(1 - THETA)).astype(np.int64)
        alive = levels > 0
        chosen, levels = chosen[alive], levels[alive]
        coded = Coded(chosen.size, indices=chosen)
        coded.streams[Role.STEP] = Stream.of(np.array([step], "<f4").tobytes())
        write_levels(coded, np.where(np.signbit(x[chosen]), -levels, levels))
        return coded

    def decode(self, coded: Coded, context: Context) -> Sparse:
        if coded.indices is None:
            raise InvalidUpdate("payload of levels without indices")
        (step,) = np.frombuffer(take(coded, Role.STEP, 4), "<f4")
        if not (np.isfinite(step) and step > 0):
            raise InvalidUpdate("the step must be finite and positive")
        with np.errstate(over="ignore"):
            values = read_levels(coded).astype(np.float32) * step
        return Sparse(coded.indices, _finite(values))

    def _step(self, found: Vector) -> np.float32:
        """The smallest survivor shall be just over the dead zone, theta s; levels stay below 2^22."""
        if not found.size:
            return np.float32(1)
        return np.float32(max(float(found.min()) / THETA, float(found.max()) / LEVELS_MAX, TINY))


def _in_rows(values: Vector, block: int) -> Vector:
    """Shape (blocks, block), the last row filled up with zeros."""
    values = np.ascontiguousarray(values, np.float32)
    blocks = -(-values.size // block)
    if values.size == blocks * block:
        return values.reshape(blocks, block)
    rows = np.zeros(blocks * block, np.float32)
    rows[: values.size] = values
    return rows.reshape(blocks, block)


def _finite(values: Vector) -> Vector:
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(values.sum(dtype=np.float32)) if values.size else 0.0
    if not np.isfinite(total) and not np.isfinite(values).all():
        raise InvalidUpdate("payload has values that are not finite")
    return values
