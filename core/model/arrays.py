"""Kinds of arrays; and arrays as bytes and back, whatever their shape and order: the one place that does it.

`np.ascontiguousarray` makes a row of a number (shape () becomes (1,)), and safetensors writes an array as it
lies in memory, be that another order than its shape says. What is written goes through here first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Vector = npt.NDArray[np.floating[Any]]
Indices = npt.NDArray[np.int64]
BLOCK = 1 << 16  # elements: a few such blocks stay in a core's own cache


def little(dtype: np.dtype[Any] | str) -> np.dtype[Any]:
    """The dtype as it is on the wire and on disks."""
    return np.dtype(dtype).newbyteorder("<")


def plain(array: npt.ArrayLike) -> Array:
    """The same shape and values in C order, little-endian; a view where the array is that."""
    found = np.asarray(array)
    return np.asarray(found, little(found.dtype), order="C")


def plain_tensors(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """`plain` of each: what safetensors may be given."""
    return {name: plain(array) for name, array in tensors.items()}


def to_bytes(array: npt.ArrayLike) -> memoryview:
    """The values in C order, little-endian; a view of the array's memory where it is that."""
    return plain(array).reshape(-1).view(np.uint8).data


def from_bytes(data: bytes | memoryview, dtype: str, shape: tuple[int, ...]) -> Array:
    """The inverse of `to_bytes`; a new array. Raises `ValueError` where the length is another."""
    return np.frombuffer(data, little(dtype)).reshape(shape).astype(dtype)
