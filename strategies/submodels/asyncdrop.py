"""The sub-models of AsyncDrop: random units, or a window of the scores by the device's speed.

| symbol | name      | meaning                                                            |
|--------|-----------|--------------------------------------------------------------------|
| n      | size      | units of a group                                                   |
| d      | dropped   | floor(drop n) units that are left out                              |
| W_t    | vector    | the model of version t                                             |
| W_0    | first     | the model of version 0                                             |
| v_u    | scores    | of unit u: sum of abs(W_t - W_0) over its places in weight tensors |
| q      | slowness  | 0 for the fastest device, 1 for the slowest                        |

    random:  d units drawn for each task
    hetero:  units in descending order of v; left out are those of the ranks start to start + d - 1
             start = round(q (n - d))

So fast devices leave out what has changed most and slow ones what has changed least. A device whose speed is
not known yet draws q. For one whose memory bears fewer than n - d units, d is what that leaves (ours). Equal
scores are in the order of a draw that is the same for the whole version: at version 0 all are equal.

Source: Dun, Hipolito, Jermaine, Dimitriadis and Kyrillidis, "Efficient and light-weight federated learning
via asynchronous distributed dropout", AISTATS 2023, algorithms 2 and 3, checked against the published script.
There the score is over the weights of the two convolutions beside a channel, as here over a unit's places in
tensors of more than one dimension, and start = r int(n / 8) for speed rank r of 8, cut at n - d: ranks 6 and
7 leave out the same. The quantile in the place of the rank is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self
from weakref import ReferenceType, ref

import numpy as np

from anabranch.core.config.tables import SubmodelTable
from anabranch.core.engine.planner import Applicant
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.units import Member, units_at_most
from anabranch.core.rng import rank, stream
from anabranch.strategies.submodels.planner import CoverageState, GroupPlanner, Units, dropped_count


class RandomUnits(GroupPlanner):
    """AsyncDrop."""

    name: ClassVar[str] = "random"

    def __init__(self, spec: ParamSpec, drop: float, coverage_versions: int = 0) -> None:
        super().__init__(spec, coverage_versions)
        self.drop = drop

    @classmethod
    def of(cls, spec: ParamSpec, table: SubmodelTable, seed: int) -> Self:
        """By the `[submodel]` table."""
        return cls(spec, table.drop, table.coverage_versions)

    def kept(self, state: Any, vector: Vector, applicant: Applicant) -> list[Units]:
        """All but d units of each group, drawn from the task's seed."""
        found = []
        for g, group in enumerate(self.spec.groups):
            d = dropped_count(group.size, self.drop, applicant.rules)
            found.append(stream(applicant.seed, "units", g).permutation(group.size)[d:])
        return found


@dataclass(frozen=True)
class HeteroState(CoverageState):
    """`first` is W_0, shape (size,)."""

    first: Vector


class HeteroWindows(GroupPlanner):
    """Hetero AsyncDrop."""

    name: ClassVar[str] = "hetero"
    state_type: ClassVar[type[Any]] = HeteroState

    def __init__(self, spec: ParamSpec, drop: float, coverage_versions: int = 0) -> None:
        super().__init__(spec, coverage_versions)
        self.drop = drop
        self._newest: Descending | None = None

    @classmethod
    def of(cls, spec: ParamSpec, table: SubmodelTable, seed: int) -> Self:
        """By the `[submodel]` table."""
        return cls(spec, table.drop, table.coverage_versions)

    def init(self, vector: Vector) -> HeteroState:
        """W_0 is kept for good."""
        return HeteroState(super().init(vector).touched, vector.copy())

    def kept(self, state: HeteroState, vector: Vector, applicant: Applicant) -> list[Units]:
        """All but the window of each group."""
        q = rank(applicant.seed, "slowness") if applicant.slowness is None else applicant.slowness
        found = []
        for descending in self._descending(state, vector, applicant.version):
            n = descending.size
            d = max(dropped_count(n, self.drop, applicant.rules), n - units_at_most(n, applicant.width_max))
            start = round(q * (n - d))
            found.append(np.delete(descending, slice(start, start + d)))
        return found

    def _descending(self, state: HeteroState, vector: Vector, version: int) -> list[Units]:
        """The units of each group, the most changed first: the same for all who ask for one version."""
        if self._newest is None or not self._newest.is_of(state, vector, version):
            self._newest = Descending.of(self.spec, state, vector, version)
        return self._newest.units


@dataclass(frozen=True, eq=False)
class Descending:
    """The units of each group by their scores, the highest first, and what these are of.

    The vectors are held weakly: a version may be gone long before somebody asks again.
    """

    version: int
    vector: ReferenceType[Vector]
    first: ReferenceType[Vector]
    units: list[Units]

    @classmethod
    def of(cls, spec: ParamSpec, state: HeteroState, vector: Vector, version: int) -> Self:
        """Of one version."""
        units = []
        for group, v in zip(spec.groups, scores(spec, vector, state.first), strict=True):
            tie = stream(0, "ties", group.name, version).permutation(group.size)
            units.append(np.lexsort((tie, -v)))
        return cls(version, ref(vector), ref(state.first), units)

    def is_of(self, state: HeteroState, vector: Vector, version: int) -> bool:
        """Whether they hold: nobody writes to a vector but to make another version of it."""
        return self.version == version and self.vector() is vector and self.first() is state.first


def scores(spec: ParamSpec, vector: Vector, first: Vector) -> list[Vector]:
    """V of every unit, for each group float64 (group.size,), of W_t and W_0, both (spec.size,)."""
    shapes = {t.name: t.shape for t in spec.tensors}
    counted = [[m for m in g.members if len(shapes[m.tensor]) > 1] or g.members for g in spec.groups]
    through: dict[str, list[tuple[Member, int]]] = {}
    for group, members in zip(spec.groups, counted, strict=True):
        for m in members:
            through.setdefault(m.tensor, []).append((m, group.size))
    largest = max((math.prod(shapes[name]) for name in through), default=0)
    parts, memory = {}, np.empty(largest, vector.dtype)
    for name, members_here in through.items():  # each tensor's changes are made once, in the same memory
        where = spec.slices[name]
        change = memory[: where.stop - where.start]
        np.abs(np.subtract(vector[where], first[where], out=change), out=change)
        parts.update({m: _along(change, shapes[name], m, size) for m, size in members_here})
    return [_sum([parts[m] for m in members]) for members in counted]


def _sum(parts: Sequence[Vector]) -> Vector:
    """From the first to the last: another order has other bits."""
    total = np.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def _along(values: Vector, shape: tuple[int, ...], m: Member, size: int) -> Vector:
    """The values of a tensor, summed for each unit."""
    before = int(np.prod(shape[: m.axis], dtype=np.int64))
    cut = values.reshape(before, m.outer, size, -1)
    found: Vector = cut.sum(axis=(0, 1, 3), dtype=np.float64)
    return found
