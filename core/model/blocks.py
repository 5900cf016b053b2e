"""The covered coordinates of a vector, some at a time: the way of values into a part of a model and back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from anabranch.core.model.arrays import BLOCK, Indices, Vector

Along = list[Indices | None]  # of a tensor, by axis: the places that are kept; None: all


@dataclass(frozen=True, eq=False, slots=True)
class PartBlock:
    """Some covered coordinates: `at` in the part; of the vector `rows` of `width` in what is `within`.

    `rows` are increasing; None: all of it is covered.
    """

    at: slice
    within: slice
    width: int
    rows: Indices | None

    def take(self, vector: Vector) -> Vector:
        """A copy of the vector's values."""
        if self.rows is None:
            return vector[self.within].copy()
        rows = vector[self.within].reshape(-1, self.width)
        return rows.take(self.rows, axis=0, mode="clip").reshape(-1)

    def put(self, values: Vector, vector: Vector) -> None:
        """Write values into the vector, whose memory is in one piece."""
        if self.rows is None:
            vector[self.within] = values
            return
        # A row is written as one element: numpy does that in two thirds of the time.
        row = np.dtype((np.void, self.width * vector.itemsize)) if self.width > 1 else vector.dtype
        written = np.asarray(values, vector.dtype, order="C")
        vector[self.within].view(row)[self.rows] = written.view(row)


def flat_places(along: Along, shape: tuple[int, ...]) -> Indices:
    """The kept places of a tensor, in its memory, increasing."""
    flat = np.zeros(1, np.int64)
    for kept, length in zip(along, shape, strict=True):
        places = np.arange(length, dtype=np.int64) if kept is None else kept
        flat = (flat[:, None] * length + places).reshape(-1)
    return flat


def tensor_blocks(along: Along, shape: tuple[int, ...], within: slice, start: int) -> Iterator[PartBlock]:
    """Of one tensor, which lies `within` the vector; `start` is its place in the part.

    What lies behind the last axis that is cut stays together as a row: a convolution has few to number.
    """
    last = max((axis for axis, kept in enumerate(along) if kept is not None), default=-1)
    if last < 0:
        yield PartBlock(slice(start, start + within.stop - within.start), within, 1, None)
        return
    width, stride = math.prod(shape[last + 1 :]), math.prod(shape[1 : last + 1])
    first = np.arange(shape[0], dtype=np.int64) if along[0] is None else along[0]
    inner = flat_places(along[1 : last + 1], shape[1 : last + 1])
    at_once = max(1, BLOCK // max(1, inner.size * width))
    for n in range(0, first.size if width else 0, at_once):
        rows = (first[n : n + at_once, None] * stride + inner).reshape(-1)
        yield PartBlock(slice(start, start + rows.size * width), within, width, rows)
        start += rows.size * width
