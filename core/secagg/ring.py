"""Masked sums in the ring of integers modulo 2^r: the server adds what it cannot read.

| symbol | name       | meaning                                                                        |
|--------|------------|--------------------------------------------------------------------------------|
| r      | bits       | of a number as it travels: 32 or 16                                            |
| v      | value_bits | of a value before it is masked, with its sign                                  |
| C      | clip       | the longest that an update counts, Euclidean                                   |
| d      | size       | values of an update                                                            |
| g      |            | 16: a value may be g times as large as all alike values of a full length       |
| R      | reach      | the largest value: what is beyond is cut                                       |
| s      | scale      | integers to a unit                                                             |
| u      | uniforms   | (d,) in [0, 1), the device's own: the rounding has no bias                     |
| W_i    | weight     | of update i, a whole number, at least 1                                        |

    x = clip_C(Delta);   R = min(C, g C / sqrt(d));   s = (2^(v-1) - 1) / R
    q = floor(clamp(x, -R, R) s + u)                            # the device; |q| <= 2^(v-1) - 1
    m = ChaCha20(seed, zero nonce), little-endian               # one for each keeper, of a seed of its own
    y = (q + sum_j m_j) mod 2^r                                 # the device sends
    Y = sum_i W_i y_i mod 2^r                                   # the server
    M_j = sum_i W_i m_{i,j} mod 2^r                             # keeper j
    S = Y - sum_j M_j mod 2^r, as a signed integer              # = sum_i W_i q_i, exactly

With a seed that nobody else has, y is uniform whatever q is. A seed that is used twice shows the difference
of two updates; so does a weight of zero, or one sum with and one without an update: a keeper sees to that.

Source: the shape is that of Papaya's asynchronous secure aggregation (Huba et al., arXiv 2111.04877;
recalled), with keepers in the place of an enclave; the cipher is that of RFC 8439.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from anabranch.core.errors import ConfigError, InvalidUpdate
from anabranch.core.model.params import Vector
from anabranch.core.privacy.mechanism import length_of

Numbers = npt.NDArray[Any]  # (d,) uint32 or uint16: numbers modulo 2^r
Integers = npt.NDArray[np.int64]

RING = "ring"  # the codec of such numbers, `compress/ring.py`
SEED_BYTES = 32
MODEL_BYTES = 32  # of the digest of what an update was trained from, which is beside the seed in its box
BOX_BYTES = 32 + SEED_BYTES + MODEL_BYTES + 16  # the sender's public key, both, the tag
BOXES_BYTES = (BOX_BYTES, BOX_BYTES - MODEL_BYTES)  # an older release's run has boxes of seeds alone
RING_BITS = (32, 16)
GAIN = 16.0  # g
BLOCK = 1 << 16  # numbers of a mask at once
_ZEROS = memoryview(bytes(4 * BLOCK))  # what is encrypted: the stream itself comes out


def dtype_of(bits: int) -> np.dtype[Any]:
    """Of numbers of so many bits, as they travel."""
    return np.dtype("<u4" if bits == 32 else "<u2")


def chain_of(bits: int, value_bits: int) -> str:
    """The codec of numbers of so many bits, for values of so many (`compress/ring.py`)."""
    return f"{RING}({bits},{value_bits})"


@dataclass(frozen=True)
class Ring:
    """r, v, C and d of a run."""

    bits: int
    value_bits: int
    clip: float
    size: int

    def check(self) -> None:
        """Raises `ConfigError`, naming the key of `[secagg]`."""
        if self.bits not in RING_BITS:
            raise ConfigError(f"secagg.bits must be 32 or 16, not {self.bits!r}")
        if not 2 <= self.value_bits <= self.bits:
            raise ConfigError(
                f"secagg.value_bits must be from 2 to secagg.bits, {self.bits}, not {self.value_bits!r}"
            )
        if not 0 < self.clip < math.inf:
            raise ConfigError(
                f"secagg.clip must be a length above 0, not {self.clip!r}: masked sums need one"
            )
        if self.size < 1:
            raise ConfigError("masked sums need a model with trained values")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the numbers."""
        return dtype_of(self.bits)

    @property
    def top(self) -> int:
        """The largest integer of a value."""
        return (1 << self.value_bits - 1) - 1

    @property
    def reach(self) -> float:
        """R."""
        return min(self.clip, GAIN * self.clip / math.sqrt(self.size))

    @property
    def scale(self) -> float:
        """S."""
        return self.top / self.reach

    @property
    def length(self) -> float:
        """S C + sqrt(d): no q of an honest device is longer, as rounding moves a value by less than 1."""
        return self.scale * self.clip + math.sqrt(self.size)

    def clipped(self, delta: Vector) -> Vector:
        """X: (d,) float64, no longer than the clip. Raises `InvalidUpdate` for values that are not finite."""
        values = np.asarray(delta, np.float64)
        length = length_of(values)
        if not math.isfinite(length):
            raise InvalidUpdate("values that are not finite are not sent: the training has diverged")
        return values * (self.clip / length) if length > self.clip else values

    def quantise(self, values: Vector, uniforms: Vector) -> Integers:
        """Q: (d,) integers, none beyond `top`."""
        reached = np.clip(values, -self.reach, self.reach) * self.scale
        # R s may be a little more than `top`, and the sum be rounded up where u is all but 1.
        return np.clip(np.floor(reached + uniforms), -self.top, self.top).astype(np.int64)

    def sent(self, delta: Vector, uniforms: Vector, seeds: Iterable[bytes]) -> Numbers:
        """Y of a delta, (d,). Raises `InvalidUpdate` as `clipped` does."""
        return self.masked(self.quantise(self.clipped(delta), uniforms), seeds)

    def masked(self, integers: Integers, seeds: Iterable[bytes]) -> Numbers:
        """Y: the integers under one mask for each seed."""
        numbers = self.numbers(integers)
        for seed in seeds:
            add_mask(numbers, seed, 1)
        return numbers

    def numbers(self, integers: Integers) -> Numbers:
        """Integers modulo 2^r: the low bits, which is what a cast of integers leaves."""
        found: Numbers = integers.astype(self.dtype)
        return found

    def empty(self) -> Numbers:
        """A sum of nothing."""
        return np.zeros(self.size, self.dtype)

    def unmasked(self, total: Numbers, mask_sums: Iterable[Numbers]) -> Integers:
        """S: what is left of a sum when the keepers' are taken away, as signed integers."""
        left = total.copy()
        for found in mask_sums:
            left -= found
        return left.view(f"<i{self.bits // 8}").astype(np.int64)


def add_weighted(total: Numbers, numbers: Numbers, weight: int) -> None:
    """Total += weight numbers mod 2^r, in place."""
    total += numbers * total.dtype.type(weight)


def add_mask(total: Numbers, seed: bytes, weight: int) -> None:
    """Total += weight m mod 2^r, in place; m: the mask of a seed of 32 bytes."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    mask, nothing = np.empty(min(BLOCK, total.size), total.dtype), _ZEROS[: BLOCK * total.itemsize]
    for start in range(0, total.size, BLOCK):
        block = total[start : start + BLOCK]
        there = mask[: block.size]
        stream.update_into(nothing[: block.nbytes], there.view(np.uint8).data)
        np.multiply(there, there.dtype.type(weight), out=there)
        block += there


def mask_of(seed: bytes, size: int, bits: int) -> Numbers:
    """M: the mask of a seed, (size,) numbers of so many bits."""
    mask = np.zeros(size, dtype_of(bits))
    add_mask(mask, seed, 1)
    return mask


def whole_weight(levels: int, weight: float) -> int:
    """W_i of a weight in [0, 1]: the nearest of `levels` steps, never none. Halves go up."""
    return max(1, math.floor(levels * weight + 0.5))
