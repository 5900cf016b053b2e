"""What a codec is, and the one that changes nothing.

A codec turns a flat vector into bytes and back. Sizes come from the manifest, never from the
message, and are checked before anything is allocated. A codec is written as text, such as `raw`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from anabranch.core.errors import InvalidUpdate, UnknownCodec
from anabranch.core.params import Vector


class Codec(Protocol):
    """`decode(encode(x), x.size, x.dtype)` gives x, exactly or within the codec's stated error."""

    text: str

    def encode(self, x: Vector) -> bytes:
        """The bytes of a vector, shape (size,)."""
        ...

    def decode(self, data: bytes | memoryview, size: int, dtype: np.dtype[Any]) -> Vector:
        """The vector of the bytes, shape (size,). Raises `InvalidUpdate`."""
        ...


class Raw:
    """Little-endian values, one after the other. Exact."""

    text = "raw"

    def encode(self, x: Vector) -> bytes:
        """The bytes of a vector, shape (size,)."""
        return x.astype(x.dtype.newbyteorder("<"), copy=False).tobytes()

    def decode(self, data: bytes | memoryview, size: int, dtype: np.dtype[Any]) -> Vector:
        """A read-only view of the bytes, shape (size,). Raises `InvalidUpdate` on a wrong length."""
        expected = size * dtype.itemsize
        if len(data) != expected:
            raise InvalidUpdate(f"payload has {len(data)} bytes, {size} values of {dtype} need {expected}")
        return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False)


CODECS: dict[str, Codec] = {"raw": Raw()}


def make_codec(text: str) -> Codec:
    """The codec of its text. Raises `UnknownCodec`."""
    if text not in CODECS:
        raise UnknownCodec(f"unknown codec: {text!r}; known: {', '.join(CODECS)}")
    return CODECS[text]
