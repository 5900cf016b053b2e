"""What the loops are, whoever runs them. Both give the same bits, errors too."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from anabranch.core.model.arrays import Indices, Vector

Data = bytes | memoryview
Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.uint16]
Levels = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]

MAGNITUDE = 0x7FFFFFFF  # of the bits of a float32: all but the sign
INFINITY_BITS = 0x7F800000  # of float32; what is not a number has more
MORE = 255  # a byte of a gap after which it goes on


class Code(IntEnum):
    """How the values of a block are written. The numbers are those of `loops.c`."""

    INT8 = 0
    INT4 = 1
    E3M0 = 2


class Found(IntEnum):
    """What was found of codes. The numbers are those of `loops.c`."""

    GOOD = 0
    BAD_CODE = 1
    BAD_PADDING = 2


@dataclass(frozen=True)
class BlockForm:
    """Codes of x / s, of which `top` is the largest, s a bf16 scale of each `block` (even, at most 256)."""

    code: Code
    block: int
    top: int

    @cached_property
    def scale_max(self) -> int:
        """The bits of the largest scale: a block of the largest float32 has to come back finite."""
        return int((np.finfo(np.float32).max / np.float32(self.top)).view(np.uint32) >> 16)

    def packed_len(self, k: int) -> int:
        """Bytes of the codes of k values."""
        return k if self.code is Code.INT8 else -(-k // 2)

    def scales(self, k: int) -> int:
        """Blocks of k values; the last one may be short."""
        return -(-k // self.block)


class Loops(Protocol):
    """The loops. Vectors are float32 unless said otherwise; what is written is given by the caller."""

    def top(self, values: Vector) -> int:
        """The bits of the largest magnitude of (n,), 0 of none: `INFINITY_BITS` and more are not finite."""
        ...

    def over(self, values: Vector, least: int, places: Indices, kept: Vector) -> int:
        """Write where (n,) has magnitudes of at least these bits, and what; returns how many there are.

        Of those the first are written that `places` and `kept`, of one size, have room for.
        """
        ...

    def encode_blocks(self, values: Vector, form: BlockForm, codes: Bytes, scales: Halves) -> int:
        """Write the codes of (n,), nearest ones, and the scales; returns `top`, from infinity on without."""
        ...

    def decode_blocks(self, codes: Bytes, scales: Halves, form: BlockForm, out: Vector) -> Found:
        """Write what the codes of (n,) stand for; `out` is worth nothing unless they are good."""
        ...

    def to_bf16(self, values: Vector, out: Halves) -> None:
        """Write the nearest bf16 of finite values (n,), ties to even; none becomes infinite."""
        ...

    def from_bf16(self, halves: Halves, out: Vector) -> bool:
        """Write the values of bf16 (n,); whether all are finite."""
        ...

    def write_gaps(self, indices: Indices) -> bytes:
        """The bytes of the gaps of strictly increasing indices (k,)."""
        ...

    def read_gaps(self, data: Data, k: int, n: int) -> Indices:
        """The k indices below n, strictly increasing. Raises `InvalidUpdate`."""
        ...

    def read_numbers(self, data: Data, k: int, n: int) -> Indices:
        """The same, of little-endian numbers of 4 bytes. Raises `InvalidUpdate`."""
        ...

    def to_levels(self, values: Vector, inverse: float, more: float, most: float, out: Levels) -> None:
        """Write sign(x) min(floor(abs(x) * inverse + more), most), in float32, of finite values (n,)."""
        ...

    def add_levels(self, out: Vector, unit: float, levels: Levels) -> None:
        """`out += levels * unit`, (n,); `unit` a power of two, and a product is exact."""
        ...

    def to_planes(self, levels: Levels, out: Bytes) -> None:
        """Write the lowest bytes of zigzag numbers (0, -1, 1 as 0, 1, 2), of (n,), to `out` (planes, n)."""
        ...

    def crc32(self, data: Data, crc: int = 0) -> int:
        """CRC-32 of what had this one and of contiguous data behind it, as `zlib` has it."""
        ...

    def permuted(self, entropy: bytes, n: int) -> Indices:
        """The numbers below n in the order in which a PCG64 of numpy's, seeded so, `permutation`s them."""
        ...

    def seed_words(self, entropy: bytes) -> Words:
        """The 4 words by which numpy seeds a generator of 16 bytes of entropy, a little-endian number."""
        ...

    def add_dense(self, out: Vector, scale: float, values: Vector) -> None:
        """`out += scale * values`, (n,), of any float dtype; a product is rounded before it is added.

        No warning where it overflows.
        """
        ...

    def add_sparse(self, out: Vector, scale: float, indices: Indices, values: Vector) -> None:
        """`out[indices] += scale * values`, (k,), of any float dtype; no index is twice."""
        ...


def gaps_max(k: int, n: int) -> int:
    """The most bytes of the gaps of k indices below n."""
    return k + n // MORE + 1
