"""Generated examples of several kinds, which decide who has them: labels need not be classes.

The splits go by the kind, as they go by the class elsewhere: a Dirichlet share of each kind, runs of devices
of one speed that have few kinds.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from anabranch.workloads.app import App, Array, Examples, Shard
from anabranch.workloads.splits import take

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pool:
    """`x` (count, ...), `y` (count,), and `kinds` (count,), the number of each example's kind."""

    x: Array
    y: Array
    kinds: Rows

    @cached_property
    def numbered(self) -> Examples:
        """Row numbers with their kinds: what is split."""
        return Examples(np.arange(len(self.kinds)), self.kinds)

    def cut(self, count: int) -> tuple[Pool, Pool]:
        """The first so many, and the others."""
        parts = slice(None, count), slice(count, None)
        first, others = (Pool(self.x[p], self.y[p], self.kinds[p]) for p in parts)
        return first, others


class PoolApp(App):
    """An App whose examples are of a training pool and a test pool."""

    @abstractmethod
    def pools(self) -> tuple[Pool, Pool]:
        """Of training, whose tenth validates, and of the test; the same at each call."""

    def data(self, shard: Shard) -> Examples:
        """`x` and `y` of a shard."""
        pool, rows = self._part(shard)
        return Examples(pool.x[rows], pool.y[rows])

    def kinds(self, shard: Shard) -> Rows:
        """The kind of each of its examples, in their order."""
        pool, rows = self._part(shard)
        return pool.kinds[rows]

    def _part(self, shard: Shard) -> tuple[Pool, Rows]:
        training, test = self.pools()
        if shard.role == "test":
            return test, np.arange(len(test.kinds))
        return training, take(training.numbered, shard).x
