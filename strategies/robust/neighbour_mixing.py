"""Neighbour mixing: each row becomes the mean of the rows nearest to it, then the geometric median of those.

| symbol | name       | meaning                                                          |
|--------|------------|------------------------------------------------------------------|
| x_i    | rows       | the n rows                                                       |
| f      | attackers  | hostile rows: floor(attackers n)                                 |
| D_ij   | squares    | ||x_i - x_j||^2                                                  |
| M      | mixing     | (n, n): 1 / (n - f) at the n - f rows nearest to x_i, itself too |
| y_i    |            | sum_j M_ij x_j, a mixed row                                      |
| c      | centre     | weights of the rows, which sum to 1: the estimate is sum_i c_i x_i |
| nu     | SMOOTHING  | a smallest distance, in median ones                              |
| R      | iterations | passes                                                           |

    ||sum_i a_i x_i - sum_i b_i x_i||^2 = -1/2 (a - b)^T D (a - b)     for weights that sum to the same
    beta_i = 1 / max(nu, ||sum c x - y_i||),     c <- sum_i beta_i M_i / sum_i beta_i,     R times
    result = sum_i c_i x_i

Honest rows come nearer to each other by mixing, so that what hides in their variance (ALIE) has less to hide
in, and those that pull against them are nobody's neighbours. All passes are on n x n numbers: beside D, which
Krum takes as well, the model is looked at once. With sub-models D is of what two rows both cover, and the
result of the rows that cover each coordinate. A row was heard by its weight over an equal one.

Source: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, "Fixing by mixing: a recipe for optimal
Byzantine ML under heterogeneity", AISTATS 2023, which puts the mixing before any rule; the formulas are
recalled. The median is Weiszfeld's of `geometric_median.py`. Ours: it is taken in weights; it starts from the
mean of the half of the mixed rows that are nearest to all, as it would not leave one that it starts from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anabranch.strategies.robust.geometric_median import LEAST, SMOOTHING
from anabranch.strategies.robust.rows import Floats, Rows
from anabranch.strategies.robust.rule import hostile

TIE = 1e-9  # rows whose sums of distances differ by less are equally near


@dataclass(frozen=True)
class NeighbourMixing:
    """The geometric median of rows, each of which was mixed with those nearest to it.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "neighbour_mixing"
    remembers: ClassVar[bool] = False

    attackers: float = 0.3
    iterations: int = 8

    def combine(self, rows: Rows, before: Floats) -> Floats:
        """Mix, then R steps of Weiszfeld's algorithm."""
        squares = rows.square_distances()
        mixing = _mixing(squares, len(rows) - hostile(self.attackers, len(rows)))
        mixed = _Mixed(mixing, squares)
        away = mixed.apart().sum(axis=1)
        c = mixing[away <= np.median(away) * (1 + TIE)].mean(axis=0)
        for _ in range(self.iterations):
            distances = mixed.distances(c)
            beta = 1.0 / np.maximum(distances, max(SMOOTHING * float(np.median(distances)), LEAST))
            c = (beta[:, None] * mixing).sum(axis=0) / beta.sum()
        rows.hear(len(rows) * c)
        return rows.mean(c)


def _mixing(squares: Floats, neighbours: int) -> Floats:
    """M for so many neighbours each; of rows that are equally near the first count."""
    out = np.zeros(squares.shape)
    for i, row in enumerate(squares):
        others = row.copy()
        others[i] = -1.0  # nobody is nearer than itself
        out[i, np.argsort(others, kind="stable")[:neighbours]] = 1.0 / neighbours
    return out


class _Mixed:
    """The mixed rows, by their weights and the distances of the rows. Sums as in `rows.py`: never BLAS's."""

    def __init__(self, mixing: Floats, squares: Floats) -> None:
        self._mixing, self._form = mixing, -0.5 * squares
        self._formed: Floats = np.einsum("ij,jk->ik", mixing, self._form)
        self._own: Floats = (self._formed * mixing).sum(axis=1)

    def apart(self) -> Floats:
        """Distances of all pairs, (n, n)."""
        both = np.einsum("ik,jk->ij", self._formed, self._mixing)
        return _root(self._own[:, None] + self._own - 2.0 * both)

    def distances(self, centre: Floats) -> Floats:
        """Of the estimate with these weights from each, (n,)."""
        formed = (self._form * centre).sum(axis=1)
        return _root((formed * centre).sum() + self._own - 2.0 * (self._mixing * formed).sum(axis=1))


def _root(squares: Floats) -> Floats:
    """Square roots; 0 where rounding, or parts that share little, would have them of less."""
    found: Floats = np.sqrt(np.maximum(squares, 0.0))
    return found
