"""TEASQ on sub-models: this project's own combination of TEASQ-Fed and AsyncDrop.

Experimental: in our own study it is no sooner than asynchronous FedAvg (docs/strategies.md).

| symbol  | name                | meaning                                                       |
|---------|---------------------|---------------------------------------------------------------|
| B_j     |                     | the updates in the cache whose sub-model covers coordinate j  |
| s_c     | s(t - h_c)          | staleness weight of update c, as in `teasq.py`                |
| n_c     | update.examples     | its examples                                                  |
| Delta_c | update.delta        | w_c - w_base on its sub-model                                 |
| tau_j   |                     | mean staleness of the updates in B_j                          |

When K updates are in the cache, for every coordinate j that is in one of them:

    D_j = sum_{c in B_j} s_c n_c Delta_cj / sum_{c in B_j} s_c n_c
    adding:   w_j <- w_j + eta S(tau_j) D_j
    mixing:   w_j <- (1 - alpha_j) w_j + alpha_j (the same mean of w_base,cj + Delta_cj)
    alpha_j = alpha S(tau_j)

All else stays as it is. Admission, cache, cut of exploded updates, codecs, schedule and both modes are
TEASQ's. Error feedback runs on the covered coordinates: what a device left out of one sub-model waits until a
later one covers it. With whole models this is TEASQ; with K = 1, S = 1, mixing and alpha = 0.5 it is
AsyncDrop; with whole models, adding, equal n_c and S = 1 it is FedBuff.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import numpy as np

from anabranch.core.engine.strategy import Context, Step
from anabranch.core.model.params import Delta, ParamSpec, SparseVector, Vector
from anabranch.core.model.submodels import (
    Submodel,
    SubmodelJson,
    TensorSet,
    gathered,
    part_blocks,
    submodel_json,
)
from anabranch.core.model.updates import Update
from anabranch.strategies.cache import CacheEntry, CacheState
from anabranch.strategies.robust.rows import stored_part
from anabranch.strategies.teasq import Teasq


@dataclass(frozen=True, eq=False)
class CachePartEntry(CacheEntry):
    """What the cache keeps of an update, with the sub-model that it covers."""

    submodel: SubmodelJson | None

    def part(self, spec: ParamSpec | None) -> Submodel | None:
        """Its sub-model."""
        return stored_part(self.submodel, spec)


@dataclass(frozen=True)
class TeasqDropState(CacheState):
    """As TEASQ's; each update in the cache with its sub-model."""

    cache: list[CachePartEntry] = field(default_factory=list)  # type: ignore[assignment]  # never written to


@dataclass(frozen=True)
class TeasqDrop(Teasq):
    """TEASQ, whose devices train sub-models: each coordinate is averaged over those that cover it.

    Experimental (docs/strategies.md). Symbols and equations: see the module.
    """

    name: ClassVar[str] = "teasq_drop"
    state_type: ClassVar[type[Any]] = TeasqDropState
    supports_submodels: ClassVar[bool] = True
    submodel: ClassVar[str] = "hetero"

    def entry(self, update: Update) -> CachePartEntry:
        """As TEASQ's, with the sub-model that it covers."""
        return CachePartEntry(**vars(super().entry(update)), submodel=submodel_json(update.submodel))

    def replaced(self, state: CacheState, update: Update) -> tuple[str, ...]:
        """The device's update of the same version; of some tensors only of the same ones."""
        found = super().replaced(state, update)
        if not isinstance(update.submodel, TensorSet):
            return found
        same = submodel_json(update.submodel)
        cache = cast("list[CachePartEntry]", state.cache)
        return tuple(c.update_id for c in cache if c.update_id in found and c.submodel == same)

    def apply(self, state: CacheState, vector: Vector, context: Context) -> Step:
        """Each coordinate by the updates that cover it."""
        parts = [c.part(context.spec) for c in state.cache]
        if all(part is None for part in parts):
            return super().apply(state, vector, context)
        shares = self.shares(state, context)
        total, pull = self._pulls(state, shares, parts, vector, context)
        if self.rule is not None:
            combined = self.by_rule(state, vector, context)
            vector += pull * total * combined.direction
            remembering = replace(self.emptied(state), memory=combined.memory)
            return Step(remembering, vector, heard=combined.heard)
        if self.mixing:
            vector *= 1 - pull * total
        for share, part, c in zip(shares, parts, state.cache, strict=True):
            if self.mixing:
                base = state.bases[str(c.base_version)]
                _add(vector, part, pull, share, gathered(base, part))
            _add(vector, part, pull, share, c.delta)
        return Step(self.emptied(state), vector)

    def _pulls_of(self, ages: Vector, count: Vector, dtype: np.dtype[Any]) -> Vector:
        """For each coordinate eta S(ages / count); 0 where count is 0.

        A power of a whole array has other last bits on another kind of processor, where a log could not be
        replayed then. There are few different pairs.
        """
        width, one = int(count.max()) + 1, dtype.type(1)
        pairs = ages * width + count
        known = np.unique(pairs)
        means = [dtype.type(age / max(n, 1)) for age, n in (divmod(int(pair), width) for pair in known)]
        powers = [float(mean + one) ** -self.a for mean in means]
        pulls = (self.mixing or self.server_lr) * np.array(powers, dtype)
        pulls[known % width == 0] = 0
        return pulls[np.searchsorted(known, pairs)]

    def _pulls(
        self,
        state: CacheState,
        shares: Sequence[float],
        parts: Sequence[Submodel | None],
        vector: Vector,
        context: Context,
    ) -> tuple[Vector, Vector]:
        """For each coordinate the sum of s_c n_c over B_j, and eta S(tau_j) over it; 0 without updates."""
        total = np.zeros_like(vector)
        ages, count = (np.zeros(vector.size) for _ in range(2))
        for share, part, age in zip(shares, parts, self.taus(state, context), strict=True):
            weight = vector.dtype.type(share)
            for block in part_blocks(part, vector.size):
                block.put(block.take(total) + weight, total)
                block.put(block.take(ages) + age, ages)
                block.put(block.take(count) + 1, count)
        pull = self._pulls_of(ages, count, vector.dtype)
        np.divide(pull, total, out=pull, where=total > 0)
        return total, pull


def _add(vector: Vector, part: Submodel | None, pull: Vector, scale: float, delta: Delta) -> None:
    """vector_j += scale pull_j delta_j on what a part covers; a sparse delta costs its own length only."""
    factor = vector.dtype.type(scale)
    if isinstance(delta, SparseVector):
        places = delta.indices if part is None else part.places(delta.indices)
        vector[places] += pull[places] * factor * delta.values
        return
    for block in part_blocks(part, vector.size):
        block.put(block.take(vector) + block.take(pull) * factor * delta[block.at], vector)
