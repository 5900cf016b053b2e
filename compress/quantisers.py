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

`sr` rounds at random, floor(x / s + u) with a u of 24 bits, without bias. Block scales are bf16, rounded up,
so that codes stay in range. Values are read and written block by block (`Dense`), each pass over one that is
still in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import numpy as np

from anabranch.compress.seeds import read_seed, write_seed
from anabranch.compress.stage import (
    BLOCK,
    Coded,
    Dense,
    Role,
    Sparse,
    StageContext,
    Stream,
    StreamStage,
    take,
)
from anabranch.core.errors import InvalidUpdate
from anabranch.core.kernels.chosen import loops
from anabranch.core.kernels.contract import INFINITY_BITS, BlockForm, Bytes, Code, Found, Halves
from anabranch.core.kernels.plain import encode_rounded
from anabranch.core.model.params import Vector
from anabranch.core.rng import random_words
from anabranch.core.rules import NEWEST

Encoding = Callable[[Vector, BlockForm, Bytes, Halves], int]
BLOCKS = (32, 64, 128, 256)
NOT_FINITE = "payload has values that are not finite"
NOT_SENT = "values that are not finite are not sent: the training has diverged"


def check_sendable(top_bits: int) -> None:
    """Raises `InvalidUpdate` where the bits of the largest magnitude are not of a finite number."""
    if top_bits >= INFINITY_BITS:
        raise InvalidUpdate(NOT_SENT)


class _Quantiser(StreamStage):
    """Dense or sparse in, streams out."""

    accepts: ClassVar[tuple[type[Any], ...]] = (Dense, Sparse)

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
        for start, block in zip(range(0, coded.k, BLOCK), value.blocks(), strict=True):
            check_sendable(loops.top(block))
            loops.to_bf16(block, out[start : start + block.size])
        coded.streams[Role.VALUES] = Stream.of(out.data.cast("B"))

    def _read(self, coded: Coded) -> Dense:
        halves = np.frombuffer(take(coded, Role.VALUES, 2 * coded.k), "<u2")

        def blocks() -> Iterator[Vector]:
            scratch = np.empty(min(BLOCK, coded.k), np.float32)
            for start in range(0, coded.k, BLOCK):
                part = halves[start : start + BLOCK]
                if not loops.from_bf16(part, scratch[: part.size]):
                    raise InvalidUpdate(NOT_FINITE)
                yield scratch[: part.size]

        return Dense(coded.k, blocks)


class _BlockCodes(_Quantiser):
    """Codes of x / s, s a scale of each block, of which `top` is the largest. The last block may be short."""

    code: ClassVar[Code]
    top: ClassVar[int]
    wrong: ClassVar[str]  # what is said of a code that there is not

    def __init__(self, block: int = 256) -> None:
        self.block = block
        self._form = BlockForm(self.code, block, self.top)

    def raw_max(self, k: int, n: int) -> int:
        return self._form.packed_len(k) + 2 * self._form.scales(k)

    def _write(self, value: Dense | Sparse, coded: Coded, context: StageContext) -> None:
        form, encode = self._form, self._encoding(context)
        packed = np.empty(form.packed_len(coded.k), np.uint8)
        halves = np.empty(form.scales(coded.k), "<u2")
        for start, block in zip(range(0, coded.k, BLOCK), value.blocks(), strict=True):
            codes, scales = packed[form.packed_len(start) :], halves[form.scales(start) :]
            check_sendable(encode(block, form, codes, scales))
        coded.streams[Role.CODES] = Stream.of(packed.data)
        coded.streams[Role.SCALES] = Stream.of(halves.data.cast("B"))

    def _read(self, coded: Coded) -> Dense:
        form = self._form
        halves = np.frombuffer(take(coded, Role.SCALES, 2 * form.scales(coded.k)), "<u2")
        if halves.size and int(halves.max()) > form.scale_max:  # negative, infinite or no number, too
            raise InvalidUpdate("scales must be finite, not negative, and of finite values")
        packed = np.frombuffer(take(coded, Role.CODES, form.packed_len(coded.k)), np.uint8)

        def blocks() -> Iterator[Vector]:
            scratch = np.empty(min(BLOCK, coded.k), np.float32)
            for start in range(0, coded.k, BLOCK):
                stop = min(start + BLOCK, coded.k)
                codes = packed[form.packed_len(start) : form.packed_len(stop)]
                scales = halves[form.scales(start) : form.scales(stop)]
                self._check(loops.decode_blocks(codes, scales, form, scratch[: stop - start]))
                yield scratch[: stop - start]

        return Dense(coded.k, blocks)

    def _check(self, found: Found) -> None:
        if found is Found.BAD_CODE:
            raise InvalidUpdate(self.wrong)
        if found is Found.BAD_PADDING:
            raise InvalidUpdate("the padding of the last code is not zero")

    def _encoding(self, context: StageContext) -> Encoding:
        """What writes the codes of a block of values, block after block."""
        return loops.encode_blocks


class BlockIntegers(_BlockCodes):
    """int8 and int4: see the module."""

    def __init__(self, block: int = 256, stochastic: bool = False, rules: int = NEWEST) -> None:
        super().__init__(block)
        self.stochastic, self._draw = stochastic, _of_words if rules else _of_bytes

    def _encoding(self, context: StageContext) -> Encoding:
        if not self.stochastic:
            return super()._encoding(context)
        words = random_words(context.seed, self.number)

        def at_random(levels: Vector) -> None:
            levels += self._draw(words, levels.size)
            np.floor(levels, out=levels)
            np.clip(levels, -self.top, self.top, out=levels)  # x / s is rounded, and so is the sum

        return partial(encode_rounded, rounded=at_random)


class Int8(BlockIntegers):
    """Values as whole numbers from -127 to 127 of a scale of their block: a byte each."""

    name: ClassVar[str] = "int8"
    number: ClassVar[int] = 12
    code: ClassVar[Code] = Code.INT8
    top: ClassVar[int] = 127
    wrong: ClassVar[str] = "codes must be within -127..127"


class Int4(BlockIntegers):
    """Values as whole numbers from -7 to 7 of a scale of their block: half a byte each.

    Two codes a byte, each plus 8: the first of a pair in the lower half.
    """

    name: ClassVar[str] = "int4"
    number: ClassVar[int] = 13
    code: ClassVar[Code] = Code.INT4
    top: ClassVar[int] = 7
    wrong: ClassVar[str] = "codes must be within -7..7"


class E3M0(_BlockCodes):
    """Values as signed powers of two of a scale of their block, and 0: half a byte each.

    Two codes a byte, the first of a pair in the lower half; each is 8 for a minus and k.
    """

    name: ClassVar[str] = "e3m0"
    number: ClassVar[int] = 15
    code: ClassVar[Code] = Code.E3M0
    top: ClassVar[int] = 1
    wrong: ClassVar[str] = "codes must not be a minus without a value"


def _of_words(words: np.random.Philox, count: int) -> Vector:
    """(count,) in [0, 1): the upper 24 bits of 32 each, which a float32 has exactly."""
    draws = words.random_raw(-(-count // 2)).astype("<u8", copy=False).view("<u4")[:count]
    draws >>= np.uint32(8)
    uniforms = draws.astype(np.float32)
    uniforms *= np.float32(2.0**-24)
    return uniforms


def _of_bytes(words: np.random.Philox, count: int) -> Vector:
    """As older releases drew, by whom values under 1/512 of a step were never rounded up."""
    draws = words.random_raw(-(-count // 8)).astype("<u8", copy=False).view(np.uint8)[:count]
    return (draws.astype(np.float32) + np.float32(0.5)) / np.float32(256)


def _check_finite(block: Vector, text: str = NOT_FINITE) -> Vector:
    if loops.top(block) >= INFINITY_BITS:
        raise InvalidUpdate(text)
    return block
