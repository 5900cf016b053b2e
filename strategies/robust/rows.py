"""The updates of a buffer as the rows of a matrix, looked at in blocks of coordinates.

A row is a delta times its weight by staleness. It may be sparse, and it may cover a part of the model only.
Lengths and distances are taken on the coordinates that are covered, and scaled as if all were, so that rows
of small sub-models compare. How sums are made is said in `core/kernels/table.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from anabranch.core.kernels import table
from anabranch.core.kernels.chosen import table_loops
from anabranch.core.kernels.table import Block, Counts, RowTable
from anabranch.core.kernels.table import Floats as Floats  # of rules, whoever writes one
from anabranch.core.model.params import Delta, Indices, ParamSpec, SparseVector, lasting_delta
from anabranch.core.model.submodels import Submodel, SubmodelJson, submodel_from_json, submodel_json
from anabranch.core.model.updates import Update


@dataclass(frozen=True, eq=False)
class StoredRow:
    """What a buffer keeps of an update until a rule takes it: `scale * delta` on what `submodel` covers."""

    delta: Delta
    scale: float
    submodel: SubmodelJson | None = None

    @classmethod
    def of(cls, update: Update, scale: float) -> StoredRow:
        """Of an update, copied if it does not last."""
        return cls(lasting_delta(update.delta), scale, submodel_json(update.submodel))

    def row(self, spec: ParamSpec | None = None) -> Row:
        """As a rule takes it; `spec` is the model's, where updates are of parts of it."""
        return Row(self.delta, places_of(stored_part(self.submodel, spec)), self.scale)


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


class Rows:
    """`n` rows of a vector of `size` coordinates, and what the rule that takes them says of each.

    `heard`: how much of each row is in the rule's result, (n,) of 0 to 1; None: the rule does not say.
    """

    def __init__(self, rows: Sequence[Row], size: int) -> None:
        self.size = size
        self.heard: Floats | None = None
        self._table = RowTable([_stored(row) for row in rows], size)

    def __len__(self) -> int:
        return len(self._table.rows)

    def blocks(self) -> Iterator[Block]:
        """All coordinates, in order."""
        return self._table.blocks()

    def hear(self, shares: Floats) -> None:
        """How much of each row is in the result, (n,); for whoever watches, it changes nothing.

        Raises `ValueError` for another number of them, and for what is none.
        """
        if np.shape(shares) != (len(self),):
            raise ValueError(
                f"rows.hear takes {len(self)} shares, one for each row, not shape {np.shape(shares)}"
            )
        if np.isnan(shares).any():
            raise ValueError("rows.hear takes shares of 0 to 1, not nan")
        self.heard = np.clip(shares, 0.0, 1.0)

    def mean(self, weights: Floats) -> Floats:
        """The weighted mean of the rows that cover each coordinate, shape (size,); 0 where none does."""
        return table_loops.row_mean(self._table, weights)

    def to_mean(self, weights: Floats, out: Floats) -> Floats:
        """Write `mean` to `out` (size,); returns the rows' distances from it, shape (n,)."""
        return self._scaled(table_loops.row_step(self._table, weights, None, out))

    def pull(self, shares: Floats, centre: Floats) -> Floats:
        """Add to `centre` (size,) the mean of share_i (x_i - centre), of the rows that cover each coordinate.

        Where none does it becomes 0. Returns the rows' distances from where it is then, shape (n,).
        """
        return self._scaled(table_loops.row_step(self._table, shares, centre, centre))

    def middle(self, cuts: Counts) -> Floats:
        """The mean of each coordinate without `cuts[m]` least and as many greatest of m rows, shape (size,).

        `cuts` has n + 1 whole numbers, each less than half of m. A row was heard on so large a part of its
        coordinates as its value lay within those that count.
        """
        found, inside = table_loops.row_middle(self._table, cuts)
        self.hear(inside / np.maximum(self._covered, 1))
        return found

    def distances(self, centre: Floats) -> Floats:
        """Euclidean, of each row from `centre` (size,) on the row's own coordinates; shape (n,)."""
        return self._scaled(table_loops.row_squares(self._table, centre))

    def square_distances(self) -> Floats:
        """Squared Euclidean distances of all pairs, (n, n), on the coordinates that both cover.

        Two rows that share nothing are as far apart as the two of the others that are farthest apart.
        """
        n = len(self)
        squares, shared = table_loops.pair_squares(self._table)
        found = np.divide(squares * self.size, shared, out=np.zeros((n, n)), where=shared > 0)
        found[(shared == 0) & np.triu(np.ones((n, n), np.bool_), 1)] = found.max(initial=0.0)
        return found + found.T

    def _scaled(self, squares: Floats) -> Floats:
        """Lengths as if all coordinates were covered."""
        return np.sqrt(squares * (self.size / np.maximum(self._covered, 1)))

    @property
    def _covered(self) -> Counts:
        """How many coordinates each row covers."""
        of_rows = (row.covered for row in self._table.rows)
        return np.array([self.size if covered is None else covered.size for covered in of_rows])


def shortened(radius: float, distances: Floats) -> Floats:
    """By how much rows at these distances are shortened that are to lie within a radius: min(1, tau / d)."""
    found: Floats = np.divide(radius, distances, out=np.ones(len(distances)), where=distances > radius)
    return found


def _stored(row: Row) -> table.TableRow:
    """A row whose stored coordinates are in order, so that a block of it is one slice."""
    covered = None if isinstance(row.where, slice) else row.where
    if not isinstance(row.delta, SparseVector):
        return table.TableRow(row.delta, row.scale, covered, covered)
    order = np.argsort(row.delta.indices)
    inside = row.delta.indices[order]
    places = inside if covered is None else covered[inside]
    return table.TableRow(row.delta.values[order], row.scale, places, covered)
