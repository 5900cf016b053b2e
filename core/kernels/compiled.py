"""The loops compiled (`loops.c`).

What one of them is not for (another dtype, odd addresses, what is to be refused) is left to its twin in
`plain`, which also has the words.
"""

from __future__ import annotations

import numpy as np

from anabranch.core.kernels import _loops, plain
from anabranch.core.kernels.contract import (
    BlockForm,
    Bytes,
    Data,
    Found,
    Halves,
    Levels,
    Words,
    gaps_max,
)
from anabranch.core.model.arrays import Indices, Vector

FLOAT32 = np.dtype(np.float32)
_permute = _loops.permute  # an AttributeError where the extension was built of older sources


def top(values: Vector) -> int:
    """See `Loops`."""
    if not _is_for_us(values):
        return plain.top(values)
    found = _loops.top(values)
    return found if found >= 0 else plain.top(values)


def over(values: Vector, least: int, places: Indices, kept: Vector) -> int:
    """See `Loops`."""
    found = _loops.over(values, least, places, kept)
    return found if found >= 0 else plain.over(values, least, places, kept)


def encode_blocks(values: Vector, form: BlockForm, codes: Bytes, scales: Halves) -> int:
    """See `Loops`."""
    found = _loops.encode(values, form.block, form.code, form.top, form.scale_max, codes, scales)
    return found if found >= 0 else plain.encode_blocks(values, form, codes, scales)


def decode_blocks(codes: Bytes, scales: Halves, form: BlockForm, out: Vector) -> Found:
    """See `Loops`."""
    found = _loops.decode(codes, scales, form.block, form.code, out)
    return Found(found) if found >= 0 else plain.decode_blocks(codes, scales, form, out)


def to_bf16(values: Vector, out: Halves) -> None:
    """See `Loops`."""
    if not _loops.to_bf16(values, out):
        plain.to_bf16(values, out)


def from_bf16(halves: Halves, out: Vector) -> bool:
    """See `Loops`."""
    return _loops.from_bf16(halves, out) or plain.from_bf16(halves, out)


def write_gaps(indices: Indices) -> bytes:
    """See `Loops`."""
    if not indices.size:
        return b""
    out = np.empty(gaps_max(indices.size, int(indices[-1]) + 1), np.uint8)
    length = _loops.write_gaps(indices, out)
    return out[:length].tobytes() if length >= 0 else plain.write_gaps(indices)


def read_gaps(data: Data, k: int, n: int) -> Indices:
    """See `Loops`."""
    if not k <= len(data) <= gaps_max(k, n):
        return plain.read_gaps(data, k, n)  # it says what is wrong
    indices = np.empty(k, np.int64)
    return indices if _loops.read_gaps(data, n, indices) else plain.read_gaps(data, k, n)


def read_numbers(data: Data, k: int, n: int) -> Indices:
    """See `Loops`."""
    indices = np.empty(k, np.int64)
    return indices if _loops.read_numbers(data, n, indices) else plain.read_numbers(data, k, n)


def to_levels(values: Vector, inverse: float, more: float, most: float, out: Levels) -> None:
    """See `Loops`."""
    if not (_is_for_us(values) and _loops.to_levels(values, inverse, more, most, out)):
        plain.to_levels(values, inverse, more, most, out)


def add_levels(out: Vector, unit: float, levels: Levels) -> None:
    """See `Loops`."""
    if not (_is_for_us(out) and _loops.add_levels(out, unit, levels)):
        plain.add_levels(out, unit, levels)


def to_planes(levels: Levels, out: Bytes) -> None:
    """See `Loops`."""
    if not _loops.to_planes(levels, out):
        plain.to_planes(levels, out)


def crc32(data: Data, crc: int = 0) -> int:
    """See `Loops`."""
    found = _loops.crc32(data, crc)
    return found if found >= 0 else plain.crc32(data, crc)


def permuted(entropy: bytes, n: int) -> Indices:
    """See `Loops`."""
    order = np.empty(n, np.int64)
    return order if _permute(entropy, order) else plain.permuted(entropy, n)


def seed_words(entropy: bytes) -> Words:
    """See `Loops`."""
    words = np.empty(4, np.uint64)
    return words if _loops.seed_words(entropy, words) else plain.seed_words(entropy)


def add_dense(out: Vector, scale: float, values: Vector) -> None:
    """See `Loops`."""
    if not (_is_for_us(out) and _is_for_us(values) and _loops.add_dense(out, scale, values)):
        plain.add_dense(out, scale, values)


def add_sparse(out: Vector, scale: float, indices: Indices, values: Vector) -> None:
    """See `Loops`."""
    ours = _is_for_us(out) and _is_for_us(values) and indices.flags.c_contiguous
    if not (ours and indices.dtype == np.int64 and _loops.add_sparse(out, scale, indices, values)):
        plain.add_sparse(out, scale, indices, values)


def _is_for_us(values: Vector) -> bool:
    return values.dtype == FLOAT32 and values.flags.c_contiguous
