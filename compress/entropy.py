"""Stages that shrink streams of bytes: zstd, and zlib's Huffman coder alone. Lossless.

A stream that does not get smaller stays as it is. Nothing is expanded before its size is known to be
the announced one, within its bound.
"""

from __future__ import annotations

import sys
import zlib
from typing import ClassVar

from anabranch.compress.stage import Coded, StageContext, Stream, StreamStage
from anabranch.core.errors import InvalidUpdate, TooLarge

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

WINDOW_BYTES_MAX = 1 << 23
SMALLEST = 32  # bytes that no coder makes smaller
MAGIC, SINGLE_SEGMENT = b"\x28\xb5\x2f\xfd", 0x20


class _Coder(StreamStage):
    """Streams in, smaller streams out."""

    def raw_max(self, k: int, n: int) -> int:
        return 0  # streams do not grow

    def encode(self, coded: Coded, context: StageContext) -> Coded:
        for role, stream in coded.streams.items():
            if len(stream.data) <= SMALLEST or stream.coder:
                continue
            smaller = self.shrink(stream.data)
            if len(smaller) < len(stream.data):
                coded.streams[role] = Stream(smaller, stream.raw_len, self.number)
        return coded

    def decode(self, coded: Coded, context: StageContext) -> Coded:
        for role, stream in coded.streams.items():
            if stream.coder == self.number:
                coded.streams[role] = Stream.of(self.expand(stream.data, stream.raw_len))
        return coded

    def shrink(self, data: bytes | memoryview) -> bytes:
        """The coded bytes."""
        raise NotImplementedError

    def expand(self, data: bytes | memoryview, size: int) -> bytes:
        """The `size` bytes that were coded. Raises `InvalidUpdate` or `TooLarge`."""
        raise NotImplementedError


class Zstd(_Coder):
    """zstd(level), level 1 unless said otherwise."""

    name: ClassVar[str] = "zstd"
    number: ClassVar[int] = 30

    def __init__(self, level: int = 1) -> None:
        self.level = level

    def shrink(self, data: bytes | memoryview) -> bytes:
        shrunk: bytes = zstd.compress(data, self.level)
        return shrunk

    def expand(self, data: bytes | memoryview, size: int) -> bytes:
        if bytes(data[: len(MAGIC)]) != MAGIC:
            raise InvalidUpdate("a zstd stream is damaged: it does not begin as a frame does")
        try:
            _check_head(data, size)
            decompressor = zstd.ZstdDecompressor(options=_longest(size))
            expanded: bytes = decompressor.decompress(data, size + 1)
        except zstd.ZstdError as error:
            raise InvalidUpdate(f"a zstd stream is damaged: {error}") from None
        if len(expanded) != size or not decompressor.eof or decompressor.unused_data:
            read = f"{len(expanded)} bytes, or a tail, instead of {size}"
            raise InvalidUpdate(f"a zstd stream is damaged: {read}")
        return expanded


def _check_head(frame: bytes | memoryview, size: int) -> None:
    """Raises `TooLarge` for a frame that asks for other memory than `size` bytes and a usual window.

    RFC 8878, section 3.1.1.1. Raises `ZstdError` for a head that is cut short.
    """
    declared = zstd.get_frame_info(frame).decompressed_size
    if declared != size:
        said = "unknown size" if declared is None else f"{declared} bytes"
        raise TooLarge(f"a zstd frame of {said} was announced as {size}")
    if frame[4] & SINGLE_SEGMENT:
        return
    exponent, mantissa = frame[5] >> 3, frame[5] & 7
    window = (1 << 10 + exponent) * (8 + mantissa) // 8
    if window > max(WINDOW_BYTES_MAX, size):
        raise TooLarge(f"a zstd window of {window} bytes is over {WINDOW_BYTES_MAX}")


def _longest(size: int) -> dict[int, int]:
    """Of a frame that was looked at no window is refused: its content may be its window."""
    return {zstd.DecompressionParameter.window_log_max: max(WINDOW_BYTES_MAX, size).bit_length()}


class Huffman(_Coder):
    """Zlib's deflate with Huffman codes and no matches: bytes near their entropy, fast."""

    name: ClassVar[str] = "huffman"
    number: ClassVar[int] = 31

    def shrink(self, data: bytes | memoryview) -> bytes:
        coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        return coder.compress(data) + coder.flush()

    def expand(self, data: bytes | memoryview, size: int) -> bytes:
        decoder = zlib.decompressobj(-15)
        try:
            expanded = decoder.decompress(data, size + 1)
        except zlib.error as error:
            raise InvalidUpdate(f"a deflate stream is damaged: {error}") from None
        if len(expanded) > size:
            raise TooLarge(f"a deflate stream has more than the announced {size} bytes")
        if len(expanded) != size or not decoder.eof or decoder.unused_data:
            raise InvalidUpdate(f"a deflate stream has {len(expanded)} bytes, or a tail, instead of {size}")
        return expanded
