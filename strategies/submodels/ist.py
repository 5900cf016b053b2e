"""IST: the units are dealt out in disjoint parts, each to one device.

| symbol | name  | meaning                                                                      |
|--------|-------|------------------------------------------------------------------------------|
| S      | parts | parts that every group is cut into, by a permutation drawn for each pass      |

A pass hands out all S parts, then the units are dealt anew. A part is on lease with its task: it comes back
when its update was taken, and is handed out again when its task was lost. A device that asks while all parts
are out gets the one that has been out for longest, as a second chance of it.

With FedAvg, S devices a round and no over-selection this is independent subnet training: every part comes
back from one device, and what all parts share (the last bias, norms that no unit runs through) is averaged.

Source: Yuan, Wolfe, Dun, Tang, Kyrillidis and Jermaine, "Distributed learning of fully connected neural
networks using independent subnet training", arXiv 1910.02120; the code was read for facts. The paper's
scaling of activations by S is not done here: that hardly changes accuracy, but leaves the whole model's
logits uncalibrated.
Leases are ours. Theory: Shulgin and Richtarik, arXiv 2306.16484.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from anabranch.core.config.tables import SubmodelTable
from anabranch.core.engine.planner import Applicant, Narrowest
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.submodels import Submodel, UnitMap, unit_map
from anabranch.core.rng import stream


@dataclass(frozen=True)
class IstState:
    """`deal`: number of the pass. `out`: parts on lease, the longest first. `done`: parts that came back."""

    deal: int = 0
    out: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)


class Ist:
    """A `Planner`. `seed` fixes every deal. Raises `ConfigError` for a group with fewer units than parts."""

    name: ClassVar[str] = "ist"
    state_type: ClassVar[type[Any]] = IstState

    def __init__(self, spec: ParamSpec, parts: int, seed: int = 0) -> None:
        self.spec, self.parts, self.seed = spec, parts, seed
        for group in spec.groups:
            if group.size < parts:
                raise ConfigError(
                    f"submodel.parts is {parts}, but group {group.name!r} has {group.size} units only"
                )
        self._dealt = lru_cache(maxsize=2)(self._deal)

    @classmethod
    def of(cls, spec: ParamSpec, table: SubmodelTable, seed: int) -> Ist:
        """By the `[submodel]` table."""
        return cls(spec, table.parts, seed)

    def narrowest(self) -> Narrowest:
        """The largest part that is dealt of any group: everybody may get it."""
        width = max(math.ceil(group.size / self.parts) / group.size for group in self.spec.groups)
        return Narrowest(width, f"submodel.parts is {self.parts}; more would be narrower")

    def init(self, vector: Vector) -> IstState:
        """The first pass."""
        return IstState()

    def plan(self, state: IstState, vector: Vector, applicant: Applicant) -> tuple[IstState, UnitMap]:
        """A part that is not out; else the one that has been out for longest."""
        free = [p for p in range(self.parts) if p not in state.out and p not in state.done]
        part = free[0] if free else state.out[0]
        out = [*(p for p in state.out if p != part), part]
        return replace(state, out=out), self._dealt(state.deal)[part]

    def applied(self, state: IstState, submodel: Submodel | None, version: int) -> IstState:
        """The part is back; the last one ends the pass."""
        part = self._part(state, submodel)
        if part is None:
            return state
        done = sorted({*state.done, part})
        if len(done) == self.parts:
            return IstState(state.deal + 1)
        return replace(state, out=[p for p in state.out if p != part], done=done)

    def released(self, state: IstState, submodel: Submodel | None) -> IstState:
        """The part may be had again."""
        part = self._part(state, submodel)
        return replace(state, out=[p for p in state.out if p != part])

    def _part(self, state: IstState, submodel: Submodel | None) -> int | None:
        """The number of a part of this pass; None: it is of an earlier one."""
        dealt = self._dealt(state.deal)
        return next((p for p, map_ in enumerate(dealt) if map_ == submodel), None)

    def _deal(self, deal: int) -> list[UnitMap]:
        """The parts of a pass: every unit is in exactly one."""
        cuts = []
        for g, group in enumerate(self.spec.groups):
            order = stream(self.seed, "deal", deal, g).permutation(group.size)
            cuts.append([np.sort(part) for part in np.array_split(order, self.parts)])
        return [unit_map(self.spec, [cut[p] for cut in cuts]) for p in range(self.parts)]
