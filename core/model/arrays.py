"""Kinds of arrays; and arrays as bytes and back, whatever their shape and order: the one place that does it.

`np.ascontiguousarray` makes a row of a number (shape () becomes (1,)), and safetensors writes an array as it
lies in memory, be that another order than its shape says. What is written goes through here first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]  # by name
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


def plain_tensors(tensors: Tensors) -> dict[str, Array]:
    """`plain` of each: what safetensors may be given."""
    return {name: plain(array) for name, array in tensors.items()}


def read_only(vector: Vector) -> Vector:
    """The same values, which nobody can change in it."""
    view = vector.view()
    view.flags.writeable = False
    return view


def lasting(array: Array) -> Array:
    """A copy to which nobody can write; the array itself where it is one.

    So what is to be kept can be copied by whoever has the time, and whoever keeps it copies nothing. A view
    is copied though it is read-only: its memory is another's.
    """
    if array.flags.owndata and not array.flags.writeable:
        return array
    found = np.array(array)
    found.setflags(write=False)
    return found


def inner(x: Vector, y: Vector) -> float:
    """Their inner product in float64; digests rest on the order in which NumPy adds here."""
    return float(np.einsum("i,i->", x, y, dtype=np.float64))


def to_bytes(array: npt.ArrayLike) -> memoryview:
    """The values in C order, little-endian; a view of the array's memory where it is that."""
    return plain(array).reshape(-1).view(np.uint8).data


def from_bytes(data: bytes | memoryview, dtype: str, shape: tuple[int, ...]) -> Array:
    """The inverse of `to_bytes`; a new array. Raises `ValueError` where the length is another."""
    return np.frombuffer(data, little(dtype)).reshape(shape).astype(dtype)


class StoredTensors(Mapping[str, Array]):
    """Tensors by name that lie in a file: each look makes a new array, and nothing is held between looks."""

    @abstractmethod
    def __contains__(self, name: object) -> bool:
        """Whether there is one of this name; `Mapping` would read it to see."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""

    @abstractmethod
    def dtype(self, name: str) -> np.dtype[Any]:
        """Of one tensor."""

    @abstractmethod
    def pieces(self, name: str) -> Iterator[Array]:
        """The values of one tensor, flat, a piece after the other; each is a new array."""


def shape_of(tensors: Tensors, name: str) -> tuple[int, ...]:
    """The shape of one tensor, which is not read for it."""
    if isinstance(tensors, dict):  # asked first: it takes a tenth of asking about an abstract class
        return tuple(tensors[name].shape)
    return tensors.shape(name) if isinstance(tensors, StoredTensors) else tuple(tensors[name].shape)


def dtype_of(tensors: Tensors, name: str) -> np.dtype[Any]:
    """The type of one tensor, which is not read for it."""
    return tensors.dtype(name) if isinstance(tensors, StoredTensors) else tensors[name].dtype


def pieces(tensors: Tensors, name: str) -> Iterator[Array]:
    """The values of one tensor, flat, in order: in one, or piece by piece where they lie in a file."""
    if isinstance(tensors, StoredTensors):
        yield from tensors.pieces(name)
    else:
        yield tensors[name].reshape(-1)


def own(tensors: Tensors, name: str) -> Array:
    """One tensor as a new array."""
    return tensors[name] if isinstance(tensors, StoredTensors) else tensors[name].copy()
