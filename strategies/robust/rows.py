"""The updates of a buffer as the rows of a matrix, looked at in blocks of coordinates.

A row is a delta times its weight by staleness. It may be sparse, and it may cover a part of the model only.
No row is ever spread out whole: a pass holds `BLOCK` coordinates of each. Lengths and distances are taken on
the coordinates that are covered, and scaled as if all were, so that rows of small sub-models compare.

Sums are float64, elementwise or numpy's pairwise ones, never BLAS's: a replay on another machine gives the
same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.model.params import Delta, Indices, ParamSpec, SparseVector, Vector
from anabranch.core.model.submodels import Submodel, SubmodelJson, submodel_from_json, submodel_json
from anabranch.core.model.updates import Update

Floats = npt.NDArray[np.float64]
BLOCK = 1 << 14  # coordinates; a block of twenty rows stays in a core's own cache


@dataclass(frozen=True, eq=False)
class StoredRow:
    """What a buffer keeps of an update until a rule takes it: `scale * delta` on what `submodel` covers."""

    delta: Delta
    scale: float
    submodel: SubmodelJson | None = None

    @classmethod
    def of(cls, update: Update, scale: float) -> StoredRow:
        """Of an update, copied."""
        return cls(stored_delta(update.delta), scale, submodel_json(update.submodel))

    def row(self, spec: ParamSpec | None = None) -> Row:
        """As a rule takes it; `spec` is the model's, where updates are of parts of it."""
        return Row(self.delta, places_of(stored_part(self.submodel, spec)), self.scale)


def stored_delta(delta: Delta) -> Delta:
    """A delta for a strategy's state: a copy where it is the whole vector."""
    return delta if isinstance(delta, SparseVector) else np.array(delta)


def stored_part(submodel: SubmodelJson | None, spec: ParamSpec | None) -> Submodel | None:
    """The sub-model that is stored so; None: the whole model."""
    if submodel is None:
        return None
    assert spec is not None, "sub-models are those of a model"
    return submodel_from_json(submodel, spec)


def places_of(submodel: Submodel | None) -> slice | Indices:
    """The coordinates that a sub-model covers, increasing."""
    return slice(None) if submodel is None else submodel.indices


@dataclass(frozen=True, eq=False)
class Row:
    """`scale * delta` on the coordinates `where` (increasing); the others are not covered."""

    delta: Delta
    where: slice | Indices = field(default_factory=lambda: slice(None))
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Block:
    """The coordinates `at` of every row: `values` (n, b), 0 where not covered; `covers` (n, b), None: all."""

    at: slice
    values: Floats
    covers: npt.NDArray[np.bool_] | None

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How many rows cover each coordinate, shape (b,)."""
        if self.covers is None:
            return np.full(self.values.shape[1], len(self.values), np.int64)
        counted: npt.NDArray[np.int64] = self.covers.sum(axis=0, dtype=np.int64)
        return counted

    def weights(self, row_weights: Floats) -> Floats:
        """Each row's weight on each coordinate: 0 where not covered; (n, 1) where all rows are whole."""
        column = row_weights[:, None]
        return column if self.covers is None else np.where(self.covers, column, 0.0)


class Rows:
    """`n` rows of a vector of `size` coordinates, and what the rule that takes them says of each.

    `heard`: how much of each row is in the rule's result, (n,) of 0 to 1; None: the rule does not say.
    """

    def __init__(self, rows: Sequence[Row], size: int) -> None:
        self.size = size
        self.heard: Floats | None = None
        self._rows = [_Prepared(row, size) for row in rows]
        self._partial = any(row.covered is not None for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def blocks(self) -> Iterator[Block]:
        """All coordinates, in order."""
        for start in range(0, self.size, BLOCK):
            stop = min(start + BLOCK, self.size)
            values = np.zeros((len(self), stop - start))
            covers = np.ones(values.shape, np.bool_) if self._partial else None
            for i, row in enumerate(self._rows):
                row.fill(start, stop, values[i], None if covers is None else covers[i])
            yield Block(slice(start, stop), values, covers)

    def hear(self, shares: Floats) -> None:
        """How much of each row is in the result, (n,); for whoever watches, it changes nothing."""
        self.heard = np.clip(shares, 0.0, 1.0)

    def mean(self, weights: Floats) -> Floats:
        """The weighted mean of the rows that cover each coordinate, shape (size,); 0 where none does."""
        out = np.zeros(self.size)
        for block in self.blocks():
            shares = block.weights(weights)
            total = np.broadcast_to(shares.sum(axis=0), out[block.at].shape)
            summed = (shares * block.values).sum(axis=0)
            np.divide(summed, total, out=out[block.at], where=total > 0)
        return out

    def distances(self, centre: Floats) -> Floats:
        """Euclidean, of each row from `centre` (size,) on the row's own coordinates; shape (n,)."""
        squares = np.zeros(len(self))
        for block in self.blocks():
            apart = block.values - centre[block.at]
            if block.covers is not None:
                apart[~block.covers] = 0.0
            squares += np.square(apart).sum(axis=1)
        return np.sqrt(squares * (self.size / np.array([row.count for row in self._rows])))

    def square_distances(self) -> Floats:
        """Squared Euclidean distances of all pairs, (n, n), on the coordinates that both cover.

        Two rows that share nothing are as far apart as the two of the others that are farthest apart.
        """
        n = len(self)
        squares, shared = np.zeros((n, n)), np.zeros((n, n))
        for block in self.blocks():
            for i in range(n):
                apart = block.values[i] - block.values[i + 1 :]
                if block.covers is None:
                    shared[i, i + 1 :] += apart.shape[1]
                else:
                    both = block.covers[i] & block.covers[i + 1 :]
                    apart[~both] = 0.0
                    shared[i, i + 1 :] += np.count_nonzero(both, axis=1)
                squares[i, i + 1 :] += np.square(apart).sum(axis=1)
        found = np.divide(squares * self.size, shared, out=np.zeros((n, n)), where=shared > 0)
        found[(shared == 0) & np.triu(np.ones((n, n), np.bool_), 1)] = found.max(initial=0.0)
        return found + found.T


def shortened(radius: float, distances: Floats) -> Floats:
    """By how much rows at these distances are shortened that are to lie within a radius: min(1, tau / d)."""
    found: Floats = np.divide(radius, distances, out=np.ones(len(distances)), where=distances > radius)
    return found


class _Prepared:
    """A row whose stored coordinates are in order, so that a block of it is one slice.

    `places` are those of `values`, None: every one. `covered` are those it covers, None: every one.
    """

    def __init__(self, row: Row, size: int) -> None:
        self.scale = row.scale
        self.covered = None if isinstance(row.where, slice) else row.where
        self.count = size if self.covered is None else max(1, self.covered.size)
        if isinstance(row.delta, SparseVector):
            order = np.argsort(row.delta.indices)
            inside = row.delta.indices[order]
            self.places: Indices | None = inside if self.covered is None else self.covered[inside]
            self.values: Vector = row.delta.values[order]
        else:
            self.places, self.values = self.covered, row.delta

    def fill(
        self, start: int, stop: int, values: npt.NDArray[Any], covers: npt.NDArray[np.bool_] | None
    ) -> None:
        """Write the coordinates from `start` to `stop`."""
        if self.places is None:
            np.multiply(self.values[start:stop], self.scale, out=values, dtype=np.float64)
        else:
            first, last = np.searchsorted(self.places, (start, stop))
            values[self.places[first:last] - start] = self.values[first:last] * np.float64(self.scale)
        if covers is not None and self.covered is not None:
            first, last = np.searchsorted(self.covered, (start, stop))
            covers[:] = False
            covers[self.covered[first:last] - start] = True
