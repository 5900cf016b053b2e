"""The IDX format of MNIST and its kin, plain or gzipped; strict, since a data path is the user's input.

Two zero bytes, the type (0x08: unsigned byte), the number of dimensions, each dimension as a big-endian
uint32, then the values and nothing else.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from anabranch.core.errors import DataError

VALUES_BYTES_MAX = 1 << 30


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array of an IDX file of unsigned bytes. Raises `DataError`, naming the file and the flaw."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: it cannot be read: {error.strerror}") from error
    try:
        if raw[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as unzipped:
                return parse_idx(unzipped, dimensions, str(path))
        return parse_idx(io.BytesIO(raw), dimensions, str(path))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: the gzip stream is broken or cut short: {error}") from error


def parse_idx(stream: IO[bytes] | Any, dimensions: int, name: str) -> npt.NDArray[np.uint8]:
    """The array of an open IDX stream; sizes are checked before anything large is read."""
    expected = bytes([0, 0, 0x08, dimensions])
    magic = stream.read(4)
    if magic != expected:
        raise DataError(
            f"{name}: it starts with {magic.hex() or 'nothing'}, an IDX file with {expected.hex()}"
        )
    header = stream.read(4 * dimensions)
    if len(header) < 4 * dimensions:
        raise DataError(f"{name}: it ends within its header")
    shape = struct.unpack(f">{dimensions}I", header)
    size_bytes = math.prod(shape)
    if size_bytes > VALUES_BYTES_MAX:
        raise DataError(f"{name}: its header claims {size_bytes} values, more than {VALUES_BYTES_MAX}")
    values = stream.read(size_bytes + 1)
    if len(values) != size_bytes:
        found = f"only {len(values)}" if len(values) < size_bytes else "more"
        raise DataError(f"{name}: its header says {size_bytes} values, it holds {found}")
    return np.frombuffer(values, np.uint8).reshape(shape)
