"""What all planners share: the choice group by group, and the guard that leaves no unit behind.

| symbol | name              | meaning                                                     |
|--------|-------------------|-------------------------------------------------------------|
| n      | group.size        | units of a group                                            |
| t      | version           | version of the model                                        |
| G      | coverage_versions | a unit that no update has touched for more than G versions  |
|        |                   | goes into every sub-model until one has (0: no guard)       |

A forced unit takes the place of the kept one that was touched last, so that sub-models stay as small as the
method makes them. The guard is this project's own.

No device gets more than `width_max` of the units of any group, so what a method keeps is cut to that.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from anabranch.core.config.tables import SubmodelTable
from anabranch.core.engine.planner import WHOLE, Applicant, Narrowest, drawn
from anabranch.core.errors import AppError
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.submodels import Submodel, UnitMap, unit_map
from anabranch.core.parts import answer_text
from anabranch.core.shares import floor_of

Units = npt.NDArray[np.int64]
UNITS_SAID = 8


@dataclass(frozen=True)
class CoverageState:
    """`touched[g][u]`: the version after the newest update of unit u of group g; 0 at the start."""

    touched: list[Units]


@dataclass(frozen=True)
class NoMemory:
    """Nothing is remembered."""


class Forgetful:
    """What planners share whose parts follow from the applicant alone: a base class, `plan` is theirs."""

    state_type: ClassVar[type[Any]] = NoMemory

    def init(self, vector: Vector) -> NoMemory:
        """Nothing."""
        return NoMemory()

    def applied(self, state: NoMemory, submodel: Submodel | None, version: int) -> NoMemory:
        """Nothing changes."""
        return state

    def released(self, state: NoMemory, submodel: Submodel | None) -> NoMemory:
        """Nothing changes."""
        return state


class GroupPlanner:
    """A `Planner` that chooses each group by itself: a base class, `kept` is for the method to write."""

    name: ClassVar[str]
    state_type: ClassVar[type[Any]] = CoverageState

    def __init__(self, spec: ParamSpec, coverage_versions: int = 0) -> None:
        self.spec, self.coverage_versions = spec, coverage_versions

    @classmethod
    def of(cls, spec: ParamSpec, table: SubmodelTable, seed: int) -> Self:
        """By the `[submodel]` table."""
        return cls(spec, table.coverage_versions)

    def init(self, vector: Vector) -> Any:
        """Nothing was touched."""
        return CoverageState([np.zeros(group.size, np.int64) for group in self.spec.groups])

    def plan(self, state: Any, vector: Vector, applicant: Applicant) -> tuple[Any, UnitMap | None]:
        """The method's choice, with what is overdue forced in. The whole model is no sub-model."""
        kept = self._checked(self.kept(state, vector, applicant))
        chosen = [drawn(self.spec, g, units, applicant) for g, units in enumerate(kept)]
        units = [self._guarded(u, t, applicant.version) for u, t in zip(chosen, state.touched, strict=True)]
        if all(len(u) == group.size for u, group in zip(units, self.spec.groups, strict=True)):
            return state, None
        return state, unit_map(self.spec, units)

    def kept(self, state: Any, vector: Vector, applicant: Applicant) -> Sequence[Units]:
        """The kept units of each group, in any order, at least one.

        Of more than the device bears so many are drawn: a method that would rather have others says them.
        """
        raise NotImplementedError

    def narrowest(self) -> Narrowest:
        """A unit of each group, as what is kept is cut; of methods with widths of their own the least one."""
        return of_smallest_group(self.spec)

    def applied(self, state: Any, submodel: Submodel | None, version: int) -> Any:
        """Its units are touched."""
        touched = []
        for g, versions in enumerate(state.touched):
            now = versions.copy()
            now[list(submodel.kept[g]) if isinstance(submodel, UnitMap) else slice(None)] = version
            touched.append(now)
        return replace(state, touched=touched)

    def released(self, state: Any, submodel: Submodel | None) -> Any:
        """Nothing was touched."""
        return state

    def _checked(self, kept: Any) -> list[Units]:
        """What `kept` gave, group by group. Raises `AppError` for what are no units of them."""
        whose, groups = f"planner {self.name!r}: kept must give", self.spec.groups
        if not isinstance(kept, Sized) or len(kept) != len(groups):
            said = f"{len(kept)}" if isinstance(kept, Sized) else answer_text(kept)
            raise AppError(f"{whose} the units of each of {len(groups)} groups, not {said}")
        found: list[Units] = [np.asarray(units) for units in kept]  # type: ignore[attr-defined]
        for units, group in zip(found, groups, strict=True):
            wanted = f"{whose} numbers of units of group {group.name!r}, at least one, each once, "
            if units.ndim != 1 or units.dtype.kind not in "iu":
                raise AppError(f"{wanted}not an array of shape {units.shape} and {units.dtype.name}")
            if (
                not units.size
                or units.min() < 0
                or units.max() >= group.size
                or np.unique(units).size < units.size
            ):
                raise AppError(f"{wanted}from 0 to {group.size - 1}, not {units.tolist()[:UNITS_SAID]}")
        return found

    def _guarded(self, chosen: Units, touched: Units, version: int) -> Units:
        if not self.coverage_versions:
            return np.sort(chosen)
        overdue = np.flatnonzero(version - touched > self.coverage_versions)
        forced = np.setdiff1d(overdue, chosen)
        if not forced.size:
            return np.sort(chosen)
        # The longest untouched first, and of the chosen ones those too that have waited longest.
        candidates = np.concatenate([forced, chosen])
        order = np.argsort(touched[candidates], kind="stable")
        return np.sort(candidates[order[: chosen.size]])


def dropped_count(n: int, drop: float, rules: int) -> int:
    """floor(drop n), so that at least one unit is kept."""
    return min(n - 1, floor_of(drop, n, rules))


def of_smallest_group(spec: ParamSpec) -> Narrowest:
    """A unit of each group, which of the smallest one is most."""
    smallest = min((g for g in spec.groups if g.size > 1), key=lambda group: group.size, default=None)
    if smallest is None:
        return WHOLE
    return Narrowest(1 / smallest.size, f"group {smallest.name!r} has {smallest.size} units")
