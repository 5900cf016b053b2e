"""Stages that make a stream of indices: u32, byte gaps, bitmap.

| stage   | layout                                                                                     |
|---------|--------------------------------------------------------------------------------------------|
| u32     | k little-endian numbers                                                                    |
| gaps    | gap_i = i_j - i_(j-1) - 1 as bytes: 255 adds 255 and goes on, any other byte ends the gap |
| bitmap  | n bits, the lowest of each byte first                                                      |

Gaps are best up to about a tenth, a bitmap above; both want an entropy coder behind them.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from anabranch.compress.stage import Coded, Role, StageContext, Stream, StreamStage, take
from anabranch.core.errors import InvalidUpdate
from anabranch.core.kernels.chosen import loops
from anabranch.core.kernels.contract import gaps_max
from anabranch.core.model.params import Indices


class _IndexCoder(StreamStage):
    """Streams with indices in, streams without out."""

    def encode(self, coded: Coded, context: StageContext) -> Coded:
        assert coded.indices is not None, "an index coder follows a stage that selects"
        coded.streams[Role.INDEX] = Stream.of(self._write(coded.indices, context.n))
        coded.indices = None
        return coded

    def decode(self, coded: Coded, context: StageContext) -> Coded:
        coded.indices = self._read(coded, context.n)
        return coded

    def _write(self, indices: Indices, n: int) -> bytes:
        raise NotImplementedError

    def _read(self, coded: Coded, n: int) -> Indices:
        raise NotImplementedError


class PlainIndices(_IndexCoder):
    """Indices as they are: 4 bytes each."""

    name: ClassVar[str] = "u32"
    number: ClassVar[int] = 20

    def raw_max(self, k: int, n: int) -> int:
        return 4 * k

    def _write(self, indices: Indices, n: int) -> bytes:
        return indices.astype("<u4").tobytes()

    def _read(self, coded: Coded, n: int) -> Indices:
        return loops.read_numbers(take(coded, Role.INDEX, 4 * coded.k), coded.k, n)


class Gaps(_IndexCoder):
    """Indices as the gaps between them, a byte or more each."""

    name: ClassVar[str] = "gaps"
    number: ClassVar[int] = 21

    def raw_max(self, k: int, n: int) -> int:
        return gaps_max(k, n)

    def _write(self, indices: Indices, n: int) -> bytes:
        return loops.write_gaps(indices)

    def _read(self, coded: Coded, n: int) -> Indices:
        stream = coded.streams.get(Role.INDEX)
        if stream is None or stream.coder:
            raise InvalidUpdate("payload lacks the stream index")
        del coded.streams[Role.INDEX]
        return loops.read_gaps(stream.data, coded.k, n)


class Bitmap(_IndexCoder):
    """Indices as one bit for each of the n values."""

    name: ClassVar[str] = "bitmap"
    number: ClassVar[int] = 22

    def raw_max(self, k: int, n: int) -> int:
        return -(-n // 8)

    def _write(self, indices: Indices, n: int) -> bytes:
        bits = np.zeros(n, bool)
        bits[indices] = True
        return np.packbits(bits, bitorder="little").tobytes()

    def _read(self, coded: Coded, n: int) -> Indices:
        packed = np.frombuffer(take(coded, Role.INDEX, -(-n // 8)), np.uint8)
        bits = np.unpackbits(packed, bitorder="little")
        indices = np.flatnonzero(bits)
        if indices.size != coded.k or (indices.size and indices[-1] >= n):
            raise InvalidUpdate(f"the bitmap has {indices.size} bits set, {coded.k} below {n} are needed")
        return indices
