"""Stages that make bytes of values: as they are, bf16, block integers, powers of two.

| stage              | a value takes | scale                                     | error                  |
|--------------------|---------------|-------------------------------------------|------------------------|
| f32                | 32 bits       |                                           | none                   |
| bf16               | 16 bits       |                                           | 2^-9 relative          |
| int8(B), int8(B,sr)| 8 + 16/B bits | s = max abs(x) / 127 of a block of B      | s/2 nearest, s random  |
| int4(B), int4(B,sr)| 4 + 16/B bits | s = max abs(x) / 7                        | s/2 nearest, s random  |
| e3m0(B)            | 4 + 16/B bits | s = max abs(x)                            | up to s/4, see below   |

e3m0 has a sign, three bits of exponent and no mantissa: 0 and s 2^(k-7), k = 1..7, so that small values of a
block keep their size where int4 makes them 0, and large ones are coarser. Each goes to the nearest, a tie to
the larger. The 4-bit floats of Streaming DiLoCo, arXiv 2501.18512; scales of blocks are ours.

`sr` rounds at random, without bias. Block scales are bf16, rounded up, so that codes stay in range. Values
are read and written block by block (`Dense`), each pass over one that is still in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from anabranch.compress.seeds import random_words, read_seed, write_seed
from anabranch.compress.stage import BLOCK, Coded, Dense, Role, Sparse, StageContext, Stream, take
from anabranch.core.errors import InvalidUpdate
from anabranch.core.model.params import Vector

BLOCKS = (32, 64, 128, 256)
TINY = np.float32(1e-30)  # blocks under this share its scale: their own would not be a normal number
HUGE_BITS = 0x7F000000  # of 2^127: from there on the scale of a block may have to be cut
INFINITY_BITS = 0x7F800000  # of float32; what is not a number has more
BF16_TOP_BITS = 0x7F7F0000  # of the largest finite bf16
BF16_TOP = np.array(BF16_TOP_BITS, np.uint32).view(np.float32)
MINUS = 8  # of a code of e3m0
POWERS = np.array(
    [0.0, *(2.0 ** (k - 7) for k in range(1, 8)), *(-(2.0 ** (k - 7)) for k in range(8))], np.float32
)
HALF_MANTISSA, EXPONENT_OF_K_0 = np.int32(1 << 22), np.int32(120)  # of float32; 2^-7
LEAST_BITS = np.int32(120 << 23)  # from 2^-7 on, half of the least power, a value is not 0
NOT_SENT = "values that are not finite are not sent: the training has diverged"
Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Bits = npt.NDArray[np.int32]


def magnitude_bits(block: Vector, scratch: Vector) -> Bits:
    """The bits of abs(block), (n,), in scratch: integers in the order of the magnitudes."""
    bits: Bits = np.abs(block, out=scratch[: block.size]).view(np.int32)
    return bits


def check_sendable(top_bits: int) -> None:
    """Raises `InvalidUpdate` where the largest of `magnitude_bits` is not of a finite number."""
    if top_bits >= INFINITY_BITS:
        raise InvalidUpdate(NOT_SENT)


def from_bf16(halves: Halves) -> Vector:
    """The float32 values of bf16, which is their upper halves."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


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

    def encode(self, value: Dense | Sparse, context: StageContext) -> Coded:
        coded = Coded(value.size)
        if isinstance(value, Sparse):
            if value.seed is None:
                coded.indices = value.indices
            else:
                write_seed(coded, value.seed)
        self._write(value, coded, context)
        return coded

    def decode(self, coded: Coded, context: StageContext) -> Dense | Sparse:
        values = self._read(coded)
        if coded.indices is not None:
            return Sparse(coded.indices, values.gather())
        if Role.SEED in coded.streams:
            return Sparse(np.empty(0, np.int64), values.gather(), read_seed(coded))
        return values

    def _write(self, value: Dense | Sparse, coded: Coded, context: StageContext) -> None:
        raise NotImplementedError

    def _read(self, coded: Coded) -> Dense:
        raise NotImplementedError


class Float32(_Quantiser):
    """Values as they are: 4 bytes each, no error."""

    name: ClassVar[str] = "f32"
    number: ClassVar[int] = 10

    def raw_max(self, k: int, n: int) -> int:
        return 4 * k

    def _write(self, value: Dense | Sparse, coded: Coded, context: StageContext) -> None:
        out = np.empty(coded.k, "<f4")
        for start, block in zip(range(0, coded.k, BLOCK), value.blocks(), strict=True):
            _check_finite(block, NOT_SENT)
            out[start : start + block.size] = block
        coded.streams[Role.VALUES] = Stream.of(out.data.cast("B"))

    def _read(self, coded: Coded) -> Dense:
        values = np.frombuffer(take(coded, Role.VALUES, 4 * coded.k), "<f4").astype(np.float32, copy=False)

        def blocks() -> Iterator[Vector]:
            for start in range(0, values.size, BLOCK):
                yield _check_finite(values[start : start + BLOCK])

        return Dense(coded.k, blocks)


class BFloat16(_Quantiser):
    """Values in 2 bytes each, the upper half of a float32.

    Rounds to the nearest, ties to even; nothing finite becomes infinite.
    """

    name: ClassVar[str] = "bf16"
    number: ClassVar[int] = 11

    def raw_max(self, k: int, n: int) -> int:
        return 2 * k

    def _write(self, value: Dense | Sparse, coded: Coded, context: StageContext) -> None:
        out = np.empty(coded.k, "<u2")
        scratch = np.empty(min(BLOCK, coded.k), np.float32)
        for start, block in zip(range(0, coded.k, BLOCK), value.blocks(), strict=True):
            top = int(magnitude_bits(block, scratch).max())
            check_sendable(top)
            finite = np.clip(block, -BF16_TOP, BF16_TOP) if top > BF16_TOP_BITS else block
            bits, rounded = finite.view(np.uint32), scratch[: block.size].view(np.uint32)
            np.right_shift(bits, 16, out=rounded)
            rounded &= np.uint32(1)
            rounded += bits
            rounded += np.uint32(0x7FFF)
            np.right_shift(rounded, 16, out=out[start : start + block.size], casting="unsafe")
        coded.streams[Role.VALUES] = Stream.of(out.data.cast("B"))

    def _read(self, coded: Coded) -> Dense:
        halves = np.frombuffer(take(coded, Role.VALUES, 2 * coded.k), "<u2")

        def blocks() -> Iterator[Vector]:
            scratch = np.empty(min(BLOCK, coded.k), np.uint32)
            for start in range(0, coded.k, BLOCK):
                part = halves[start : start + BLOCK]
                np.left_shift(part, np.uint32(16), out=scratch[: part.size], dtype=np.uint32)
                yield _check_finite(scratch[: part.size].view(np.float32))

        return Dense(coded.k, blocks)


class _BlockCodes(_Quantiser):
    """Codes of x / s, s a scale of each block, of which `top` is the largest. The last block may be short."""

    top: ClassVar[int]

    def __init__(self, block: int = 256) -> None:
        self.block = block
        self._starts = np.arange(0, BLOCK, block)
        # A block of the largest float32 has to come back finite.
        self._scale_max = int(np.array(np.finfo(np.float32).max / self.top, np.float32).view(np.uint32) >> 16)

    def raw_max(self, k: int, n: int) -> int:
        return self._packed_len(k) + 2 * -(-k // self.block)

    def _write(self, value: Dense | Sparse, coded: Coded, context: StageContext) -> None:
        packed = np.empty(self._packed_len(coded.k), np.uint8)
        halves = np.empty(-(-coded.k // self.block), "<u2")
        scratch = np.empty(min(BLOCK, coded.k) + 1, np.float32)
        rounded = self._rounding(context)
        for start, block in zip(range(0, coded.k, BLOCK), value.blocks(), strict=True):
            own = halves[start // self.block : -(-(start + block.size) // self.block)]
            rounded(self._levels(block, own, scratch))
            self._pack(scratch, block.size, packed[self._packed_len(start) :])
        coded.streams[Role.CODES] = Stream.of(packed.data)
        coded.streams[Role.SCALES] = Stream.of(halves.data.cast("B"))

    def _levels(self, block: Vector, halves: Halves, scratch: Vector) -> Vector:
        """The quotients x / s of a block of values, in scratch; the scales s go to `halves`."""
        bits = magnitude_bits(block, scratch)
        tops = np.maximum.reduceat(bits, self._starts[: halves.size])
        top = int(tops.max())
        check_sendable(top)
        scales = np.maximum(tops.view(np.float32), TINY)
        scales /= np.float32(self.top)
        scale_bits = scales.view(np.uint32)
        scale_bits += np.uint32(0xFFFF)
        scale_bits &= np.uint32(0xFFFF0000)
        if top >= HUGE_BITS:
            np.minimum(scale_bits, self._scale_max << 16, out=scale_bits)
        np.right_shift(scale_bits, 16, out=halves, casting="unsafe")
        inverse = np.reciprocal(scales, out=scales)
        levels, whole = scratch[: block.size], block.size // self.block * self.block
        rows = levels[:whole].reshape(-1, self.block)
        np.multiply(block[:whole].reshape(-1, self.block), inverse[: len(rows), None], out=rows)
        np.multiply(block[whole:], inverse[-1], out=levels[whole:])
        return np.clip(levels, -self.top, self.top, out=levels) if top >= HUGE_BITS else levels

    def _read(self, coded: Coded) -> Dense:
        halves = np.frombuffer(take(coded, Role.SCALES, 2 * -(-coded.k // self.block)), "<u2")
        if halves.size and int(halves.max()) > self._scale_max:  # negative, infinite or no number, too
            raise InvalidUpdate("scales must be finite, not negative, and of finite values")
        packed = np.frombuffer(take(coded, Role.CODES, self._packed_len(coded.k)), np.uint8)

        def blocks() -> Iterator[Vector]:
            scratch = np.empty(min(BLOCK, coded.k), np.float32)
            for start in range(0, coded.k, BLOCK):
                size = min(BLOCK, coded.k - start)
                values, whole = scratch[:size], size // self.block * self.block
                self._unpack(packed[self._packed_len(start) : self._packed_len(start + size)], values)
                scales = from_bf16(halves[start // self.block : -(-(start + size) // self.block)])
                rows = values[:whole].reshape(-1, self.block)
                np.multiply(rows, scales[: len(rows), None], out=rows)
                values[whole:] *= scales[-1]
                yield values

        return Dense(coded.k, blocks)

    def _rounding(self, context: StageContext) -> Callable[[Vector], None]:
        """What makes codes of quotients x / s, in their place, chunk after chunk."""
        raise NotImplementedError

    def _packed_len(self, k: int) -> int:
        raise NotImplementedError

    def _pack(self, levels: Vector, k: int, out: Bytes) -> None:
        """The codes levels[:k], whole numbers; levels[k] is free."""
        raise NotImplementedError

    def _unpack(self, packed: Bytes, out: Vector) -> None:
        """What codes stand for, where s is 1."""
        raise NotImplementedError


class BlockIntegers(_BlockCodes):
    """int8 and int4: see the module."""

    def __init__(self, block: int = 256, stochastic: bool = False) -> None:
        super().__init__(block)
        self.stochastic = stochastic

    def _rounding(self, context: StageContext) -> Callable[[Vector], None]:
        if not self.stochastic:
            return _to_nearest
        words = random_words(context.seed, self.number)

        def at_random(levels: Vector) -> None:
            draws = words.random_raw(-(-levels.size // 8)).astype("<u8", copy=False).view(np.uint8)
            levels += (draws[: levels.size].astype(np.float32) + np.float32(0.5)) / np.float32(256)
            np.floor(levels, out=levels)

        return at_random


class Int8(BlockIntegers):
    """Values as whole numbers from -127 to 127 of a scale of their block: a byte each."""

    name: ClassVar[str] = "int8"
    number: ClassVar[int] = 12
    top: ClassVar[int] = 127

    def _packed_len(self, k: int) -> int:
        return k

    def _pack(self, levels: Vector, k: int, out: Bytes) -> None:
        np.copyto(out[:k].view(np.int8), levels[:k], casting="unsafe")

    def _unpack(self, packed: Bytes, out: Vector) -> None:
        codes = packed.view(np.int8)
        if int(codes.min()) < -self.top:
            raise InvalidUpdate(f"codes must be within -{self.top}..{self.top}")
        np.copyto(out, codes)


class Int4(BlockIntegers):
    """Values as whole numbers from -7 to 7 of a scale of their block: half a byte each.

    Two codes a byte, each plus 8: the first of a pair in the lower half.
    """

    name: ClassVar[str] = "int4"
    number: ClassVar[int] = 13
    top: ClassVar[int] = 7

    def _packed_len(self, k: int) -> int:
        return -(-k // 2)

    def _pack(self, levels: Vector, k: int, out: Bytes) -> None:
        even = k + k % 2
        levels[k:even] = -8
        _pack_halves(levels[:even].astype(np.int8) + np.int8(8), out)

    def _unpack(self, packed: Bytes, out: Vector) -> None:
        codes = _unpacked_halves(packed, out.size)
        if not codes.all():
            raise InvalidUpdate(f"codes must be within -{self.top}..{self.top}")
        np.subtract(codes, np.float32(8), out=out, dtype=np.float32)


class E3M0(_BlockCodes):
    """Values as signed powers of two of a scale of their block, and 0: half a byte each.

    Two codes a byte, the first of a pair in the lower half; each is 8 for a minus and k.
    """

    name: ClassVar[str] = "e3m0"
    number: ClassVar[int] = 15
    top: ClassVar[int] = 1

    def _rounding(self, context: StageContext) -> Callable[[Vector], None]:
        return _to_powers

    def _packed_len(self, k: int) -> int:
        return -(-k // 2)

    def _pack(self, levels: Vector, k: int, out: Bytes) -> None:
        even = k + k % 2
        levels[k:even] = 0
        _pack_halves(levels[:even].astype(np.int8), out)

    def _unpack(self, packed: Bytes, out: Vector) -> None:
        codes = _unpacked_halves(packed, out.size)
        if (codes == MINUS).any():
            raise InvalidUpdate("codes must not be a minus without a value")
        np.copyto(out, POWERS[codes])


def _to_nearest(levels: Vector) -> None:
    np.rint(levels, out=levels)


def _to_powers(levels: Vector) -> None:
    """The codes of e3m0 of values from -1 to 1. The next power is nearer from half of the mantissa on."""
    bits = magnitude_bits(levels, np.empty_like(levels))
    codes = np.clip(((bits + HALF_MANTISSA) >> 23) - EXPONENT_OF_K_0, bits >= LEAST_BITS, 7)
    codes[(levels < 0) & (codes > 0)] += MINUS
    np.copyto(levels, codes)


def _pack_halves(codes: npt.NDArray[np.int8], out: Bytes) -> None:
    """Two codes of 0 to 15 a byte, of an even number of them."""
    pairs = codes.view("<u2")
    pairs |= pairs >> 4
    np.copyto(out[: codes.size // 2], pairs, casting="unsafe")


def _unpacked_halves(packed: Bytes, count: int) -> Bytes:
    """The inverse. Raises `InvalidUpdate` where what is over is not zero."""
    pairs = packed.astype("<u2")
    pairs |= pairs << 4
    codes = (pairs & 0x0F0F).view(np.uint8)
    if codes[count:].any():
        raise InvalidUpdate("the padding of the last code is not zero")
    return codes[:count]


def _check_finite(block: Vector, text: str = "payload has values that are not finite") -> Vector:
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(block.sum())
    if not np.isfinite(total) and not np.isfinite(block).all():
        raise InvalidUpdate(text)
    return block
