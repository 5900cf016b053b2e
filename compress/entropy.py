"""Stages that shrink streams of bytes: zstd, and zlib's Huffman coder alone. Lossless.

A stream that does not get smaller stays as it is. Nothing is expanded before its size is known to be
the announced one, within its bound.
"""

from __future__ import annotations

import zlib
from typing import Any, ClassVar

import zstandard

from anabranch.compress.stage import Coded, StageContext, Stream
from anabranch.core.errors import InvalidUpdate, TooLarge

WINDOW_BYTES_MAX = 1 << 23
SMALLEST = 32  # bytes that no coder makes smaller


class _Coder:
    """Streams in, smaller streams out."""

    name: ClassVar[str]
    number: ClassVar[int]
    version: ClassVar[int] = 1
    accepts: ClassVar[tuple[type[Any], ...]] = (Coded,)

    def emits(self, accepted: type[Any]) -> type[Any]:
        return Coded

    def values_max(self, n: int) -> int:
        return n

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
        # One for each call: they are cheap, and not for two threads at a time.
        compressor = zstandard.ZstdCompressor(self.level, write_checksum=False, write_content_size=True)
        shrunk: bytes = compressor.compress(data)
        return shrunk

    def expand(self, data: bytes | memoryview, size: int) -> bytes:
        try:
            frame = zstandard.get_frame_parameters(data)
            # `max_output_size` alone does not protect: it is ignored where a frame declares its size.
            if frame.content_size != size:
                raise TooLarge(f"a zstd frame of {frame.content_size} bytes was announced as {size}")
            if frame.window_size > max(WINDOW_BYTES_MAX, size):
                raise TooLarge(f"a zstd window of {frame.window_size} bytes is over {WINDOW_BYTES_MAX}")
            decompressor = zstandard.ZstdDecompressor()
            expanded: bytes = decompressor.decompress(data, size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise InvalidUpdate(f"a zstd stream is damaged: {error}") from None
        if len(expanded) != size:
            raise InvalidUpdate(f"a zstd stream has {len(expanded)} bytes, not {size}")
        return expanded


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
