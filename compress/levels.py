"""Integers that are not zero as streams: signs as bits, magnitudes less one as bytes, the rest as u32.

A magnitude of 256 or more has the byte 255 and its excess, magnitude - 256, among the u32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.compress.stage import Coded, Role, Stream, take
from anabranch.core.errors import InvalidUpdate

ESCAPE = 255
Levels = npt.NDArray[np.signedinteger[Any]]


def levels_max(k: int) -> int:
    """The most bytes of k levels."""
    return -(-k // 8) + k + 4 * k


def write_levels(coded: Coded, levels: Levels) -> None:
    """The streams of levels (k,), none of them zero."""
    magnitudes = np.abs(levels) - 1
    small = np.minimum(magnitudes, ESCAPE).astype(np.uint8)
    excess = magnitudes[small == ESCAPE] - ESCAPE
    coded.streams[Role.SIGNS] = Stream.of(np.packbits(levels < 0, bitorder="little").tobytes())
    coded.streams[Role.MAGNITUDES] = Stream.of(small.tobytes())
    coded.streams[Role.CODES] = Stream.of(excess.astype("<u4").tobytes())


def read_levels(coded: Coded) -> Levels:
    """The inverse of `write_levels`. Raises `InvalidUpdate`."""
    small = np.frombuffer(take(coded, Role.MAGNITUDES, coded.k), np.uint8)
    levels = small.astype(np.int64) + 1
    escaped = np.flatnonzero(small == ESCAPE)
    levels[escaped] += np.frombuffer(take(coded, Role.CODES, 4 * escaped.size), "<u4")
    bits = np.unpackbits(
        np.frombuffer(take(coded, Role.SIGNS, -(-coded.k // 8)), np.uint8), bitorder="little"
    )
    if bits[coded.k :].any():
        raise InvalidUpdate("the padding of the signs is not zero")
    np.negative(levels, out=levels, where=bits[: coded.k].view(bool))
    return levels
