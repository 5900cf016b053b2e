"""The loops by numpy: what runs without a compiler, and what the compiled ones are held to.

All of them work within a block that the caller chose, which is still in the cache from one pass to the next.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.errors import InvalidUpdate
from anabranch.core.kernels.contract import (
    INFINITY_BITS,
    MAGNITUDE,
    MORE,
    BlockForm,
    Bytes,
    Code,
    Data,
    Found,
    Halves,
    Levels,
    Words,
    gaps_max,
)
from anabranch.core.model.arrays import BLOCK, Indices, Vector

TINY = np.float32(1e-30)  # blocks under this share its scale: their own would not be a normal number
HUGE_BITS = 0x7F000000  # of 2^127: from there on the scale of a block may have to be cut
BF16_TOP_BITS = 0x7F7F0000  # of the largest finite bf16
BF16_TOP = np.array(BF16_TOP_BITS, np.uint32).view(np.float32)
MINUS = 8  # of a code of e3m0
POWERS = np.array(
    [0.0, *(2.0 ** (k - 7) for k in range(1, 8)), *(-(2.0 ** (k - 7)) for k in range(8))], np.float32
)
HALF_MANTISSA, EXPONENT_OF_K_0 = np.int32(1 << 22), np.int32(120)  # of float32; 2^-7
LEAST_BITS = np.int32(120 << 23)  # from 2^-7 on, half of the least power, a value is not 0
Bits = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


def magnitude_bits(values: Vector) -> Bits:
    """The bits of abs(values), (n,): integers in the order of the magnitudes."""
    bits: Bits = values.view(np.int32) & np.int32(MAGNITUDE)
    return bits


def top(values: Vector) -> int:
    """See `Loops`."""
    return int(magnitude_bits(values).max(initial=0))


def over(values: Vector, least: int, places: Indices, kept: Vector) -> int:
    """See `Loops`."""
    flags = np.zeros(-(-values.size // 8) * 8, bool)
    np.greater_equal(magnitude_bits(values), least, out=flags[: values.size])
    found = _places(flags)
    fit = found[: places.size]
    places[: fit.size] = fit
    kept[: fit.size] = values[fit]
    return found.size


def _places(flags: Flags) -> Indices:
    """Where flags (a multiple of 8) are set. Few are found sooner by looking at eight at a time."""
    if np.count_nonzero(flags) * 32 > flags.size:
        return np.flatnonzero(flags)
    words = flags.view(np.uint64)
    filled = np.flatnonzero(words != 0)
    places = np.flatnonzero(words[filled].view(bool))
    found: Indices = filled[places >> 3] * 8 + (places & 7)
    return found


# --- codes of blocks -------------------------------------------------------------------------


def encode_blocks(values: Vector, form: BlockForm, codes: Bytes, scales: Halves) -> int:
    """See `Loops`."""
    return encode_rounded(values, form, codes, scales, _to_powers if form.code is Code.E3M0 else _to_nearest)


def encode_rounded(
    values: Vector, form: BlockForm, codes: Bytes, scales: Halves, rounded: Callable[[Vector], None]
) -> int:
    """`encode_blocks` with a rounding of one's own: it makes codes of quotients x / s, in their place."""
    if not values.size:
        return 0
    levels = np.empty(values.size + 1, np.float32)  # one more, for the last half byte
    highest = _quotients(values, form, scales, levels)
    if highest < INFINITY_BITS:
        rounded(levels[: values.size])
        _pack(levels, values.size, form.code, codes)
    return highest


def _quotients(values: Vector, form: BlockForm, halves: Halves, levels: Vector) -> int:
    """The quotients x / s, and the bits of the scales s; returns `top`."""
    tops = np.maximum.reduceat(magnitude_bits(values), np.arange(0, values.size, form.block))
    highest = int(tops.max())
    if highest >= INFINITY_BITS:
        return highest
    scales = np.maximum(tops.view(np.float32), TINY)
    scales /= np.float32(form.top)
    scale_bits = scales.view(np.uint32)
    scale_bits += np.uint32(0xFFFF)
    scale_bits &= np.uint32(0xFFFF0000)
    if highest >= HUGE_BITS:
        np.minimum(scale_bits, form.scale_max << 16, out=scale_bits)
    np.right_shift(scale_bits, 16, out=halves[: scales.size], casting="unsafe")
    inverse = np.reciprocal(scales, out=scales)
    whole = values.size // form.block * form.block
    rows = levels[:whole].reshape(-1, form.block)
    np.multiply(values[:whole].reshape(-1, form.block), inverse[: len(rows), None], out=rows)
    np.multiply(values[whole:], inverse[-1], out=levels[whole : values.size])
    if highest >= HUGE_BITS:
        np.clip(levels[: values.size], -form.top, form.top, out=levels[: values.size])
    return highest


def _to_nearest(levels: Vector) -> None:
    np.rint(levels, out=levels)


def _to_powers(levels: Vector) -> None:
    """The codes of e3m0 of values from -1 to 1. The next power is nearer from half of the mantissa on."""
    bits = magnitude_bits(levels)
    codes = np.clip(((bits + HALF_MANTISSA) >> 23) - EXPONENT_OF_K_0, bits >= LEAST_BITS, 7)
    codes[(levels < 0) & (codes > 0)] += MINUS
    np.copyto(levels, codes)


def _pack(levels: Vector, k: int, code: Code, out: Bytes) -> None:
    """The codes levels[:k], whole numbers; levels[k] is free."""
    if code is Code.INT8:
        np.copyto(out[:k].view(np.int8), levels[:k], casting="unsafe")
        return
    even, zero = k + k % 2, 8 if code is Code.INT4 else 0
    levels[k:even] = -zero
    pairs = (levels[:even].astype(np.int8) + np.int8(zero)).view("<u2")
    pairs |= pairs >> 4
    np.copyto(out[: even // 2], pairs, casting="unsafe")


def decode_blocks(codes: Bytes, scales: Halves, form: BlockForm, out: Vector) -> Found:
    """See `Loops`."""
    found = _unpack(codes, form.code, out)
    if found is not Found.GOOD:
        return found
    whole = out.size // form.block * form.block
    of_blocks = (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)
    rows = out[:whole].reshape(-1, form.block)
    np.multiply(rows, of_blocks[: len(rows), None], out=rows)
    out[whole:] *= of_blocks[-1]
    return found


def _unpack(packed: Bytes, code: Code, out: Vector) -> Found:
    """What codes stand for, where s is 1."""
    if code is Code.INT8:
        whole = packed.view(np.int8)
        np.copyto(out, whole)
        return Found.BAD_CODE if int(whole.min()) < -127 else Found.GOOD
    pairs = packed.astype("<u2")
    pairs |= pairs << 4
    halves = (pairs & 0x0F0F).view(np.uint8)
    if halves[out.size :].any():
        return Found.BAD_PADDING
    codes = halves[: out.size]
    if code is Code.INT4:
        np.subtract(codes, np.float32(8), out=out, dtype=np.float32)
        return Found.GOOD if codes.all() else Found.BAD_CODE
    np.copyto(out, POWERS[codes])
    return Found.BAD_CODE if (codes == MINUS).any() else Found.GOOD


# --- bf16 ------------------------------------------------------------------------------------


def to_bf16(values: Vector, out: Halves) -> None:
    """See `Loops`."""
    bits = np.clip(values, -BF16_TOP, BF16_TOP).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    np.right_shift(rounded, 16, out=out, casting="unsafe")


def from_bf16(halves: Halves, out: Vector) -> bool:
    """See `Loops`."""
    np.left_shift(halves, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    return top(out) < INFINITY_BITS


# --- indices ---------------------------------------------------------------------------------


def write_gaps(indices: Indices) -> bytes:
    """See `Loops`."""
    if not indices.size:
        return b""
    gaps = np.empty(indices.size, np.int64)
    gaps[0] = indices[0] + 1
    np.subtract(indices[1:], indices[:-1], out=gaps[1:])
    gaps -= 1
    long = np.flatnonzero(gaps >= MORE)
    if not long.size:
        return gaps.astype(np.uint8).tobytes()
    lengths = np.ones(gaps.size, np.int64)
    lengths[long] += gaps[long] // MORE
    gaps[long] %= MORE
    ends = np.cumsum(lengths)
    out = np.full(int(ends[-1]), MORE, np.uint8)
    out[ends - 1] = gaps
    return out.tobytes()


def read_gaps(data: Data, k: int, n: int) -> Indices:
    """See `Loops`."""
    if len(data) > gaps_max(k, n) or len(data) < k:
        raise InvalidUpdate(f"gaps of {len(data)} bytes cannot be {k} indices below {n}")
    gaps = np.frombuffer(data, np.uint8)
    if len(gaps) == k:
        if k and int(gaps.max()) == MORE:
            raise InvalidUpdate("the last gap has no end")
        indices: Indices = np.cumsum(gaps, dtype=np.int64)
    else:
        ends = np.flatnonzero(gaps != MORE)
        if ends.size != k or gaps[-1] == MORE:
            raise InvalidUpdate(f"the gaps are of {ends.size} indices, {k} are needed")
        indices = np.cumsum(gaps, dtype=np.int64)[ends]
    indices += np.arange(k)
    if k and indices[-1] >= n:
        raise InvalidUpdate(f"index {int(indices[-1])} is over {n - 1}")
    return indices


def read_numbers(data: Data, k: int, n: int) -> Indices:
    """See `Loops`."""
    indices = np.frombuffer(data, "<u4", k).astype(np.int64)
    check_increasing(indices, n)
    return indices


def check_increasing(indices: Indices, n: int) -> None:
    """Raises `InvalidUpdate` unless the indices are strictly increasing and within 0..n-1."""
    if indices.size and (indices[0] < 0 or indices[-1] >= n or bool(np.any(indices[1:] <= indices[:-1]))):
        raise InvalidUpdate(f"indices must be strictly increasing and within 0..{n - 1}")


# --- levels of a grid -------------------------------------------------------------------------


def to_levels(values: Vector, inverse: float, more: float, most: float, out: Levels) -> None:
    """See `Loops`."""
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK]
        levels = np.abs(block)
        levels *= np.float32(inverse)
        levels += np.float32(more)
        np.minimum(np.floor(levels, out=levels), most, out=levels)
        np.copysign(levels, block, out=levels)
        out[start : start + BLOCK] = levels


def add_levels(out: Vector, unit: float, levels: Levels) -> None:
    """See `Loops`."""
    for start in range(0, levels.size, BLOCK):
        values = levels[start : start + BLOCK].astype(np.float32)
        values *= np.float32(unit)
        out[start : start + BLOCK] += values


def to_planes(levels: Levels, out: Bytes) -> None:
    """See `Loops`."""
    for start in range(0, levels.size, BLOCK):
        block = levels[start : start + BLOCK]
        folded = ((block << 1) ^ (block >> 31)).astype("<u4").view(np.uint8).reshape(-1, 4)
        out[:, start : start + BLOCK] = folded[:, : len(out)].T


# --- bytes ----------------------------------------------------------------------------------


def crc32(data: Data, crc: int = 0) -> int:
    """See `Loops`."""
    return zlib.crc32(data, crc)


# --- draws ----------------------------------------------------------------------------------


def permuted(entropy: bytes, n: int) -> Indices:
    """See `Loops`."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(entropy, "little"))).permutation(n)


def seed_words(entropy: bytes) -> Words:
    """See `Loops`."""
    words = np.random.SeedSequence(int.from_bytes(entropy, "little")).generate_state(4, np.uint64)
    return words.view(np.uint64)


# --- the fold --------------------------------------------------------------------------------


def _silent() -> np.errstate:
    """As the compiled loops: no warning of a sum that is no number any more, at which whoever folds looks."""
    return np.errstate(over="ignore", invalid="ignore")


def add_dense(out: Vector, scale: float, values: Vector) -> None:
    """See `Loops`; without a temporary of the size of a model."""
    factor, wide = out.dtype.type(scale), np.promote_types(values.dtype, out.dtype)
    scratch = np.empty(min(BLOCK, out.size), out.dtype)
    with _silent():
        for start in range(0, out.size, BLOCK):
            block = out[start : start + BLOCK]
            product: npt.NDArray[Any] = scratch[: block.size]
            np.multiply(values[start : start + BLOCK], factor, out=product, dtype=wide)
            block += product


def add_sparse(out: Vector, scale: float, indices: Indices, values: Vector) -> None:
    """See `Loops`."""
    wide = np.promote_types(values.dtype, out.dtype)  # NumPy 1 would look at the number, not at its type
    with _silent():
        out[indices] += np.multiply(values, out.dtype.type(scale), dtype=wide)
