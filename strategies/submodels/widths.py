"""Sub-models as wide as a device is fast: HeteroFL, FedRolex and FjORD. None of this is AsyncDrop's.

| symbol | name     | meaning                                                                       |
|--------|----------|-------------------------------------------------------------------------------|
| n      | size     | units of a group                                                              |
| s      | widths   | the widths there are, as fractions of n, the widest first                     |
| r      |          | the device's own: the fastest devices get s_1, the next s_2, equal shares     |
| k      |          | ceil(r n) units are kept                                                      |
| t      | version  | version of the model                                                          |

    heterofl:  the first k units
    fedrolex:  k units from unit t mod n on, going round
    fjord:     the first k units, r drawn for each task from the widths that are not over the device's own

Sources: Diao, Ding and Tarokh, "HeteroFL", ICLR 2021; Alam, Liu, Yan and Zhang, "FedRolex", NeurIPS 2022;
Horvath, Laskaridis, Almeida, Leontiadis, Venieris and Lane, "FjORD", NeurIPS 2021: all recalled, not read.
What they add to the choice of units is not here: HeteroFL's scaler, masked loss and static norms, FjORD's
self-distillation. FedRolex rolls once a round, here once a version. A device whose speed is not known yet
gets the narrowest width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np

from anabranch.core.config.tables import SubmodelTable
from anabranch.core.engine.planner import Applicant
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.rng import stream
from anabranch.strategies.submodels.planner import GroupPlanner, Units


class HeteroFL(GroupPlanner):
    """The first units."""

    name: ClassVar[str] = "heterofl"

    def __init__(self, spec: ParamSpec, widths: Sequence[float], coverage_versions: int = 0) -> None:
        super().__init__(spec, coverage_versions)
        self.widths = sorted(widths, reverse=True)

    @classmethod
    def of(cls, spec: ParamSpec, table: SubmodelTable, seed: int) -> Self:
        """By the `[submodel]` table."""
        return cls(spec, table.widths, table.coverage_versions)

    def kept(self, state: Any, vector: Vector, applicant: Applicant) -> list[Units]:
        """K units of each group from where the method begins."""
        width = self.width(applicant)
        return [
            (self.start(group.size, applicant.version) + np.arange(_count(group.size, width))) % group.size
            for group in self.spec.groups
        ]

    def width(self, applicant: Applicant) -> float:
        """R."""
        return self.widths[self._level(applicant)]

    def start(self, size: int, version: int) -> int:
        """The first unit that is kept."""
        return 0

    def _level(self, applicant: Applicant) -> int:
        last = len(self.widths) - 1
        return last if applicant.slowness is None else min(last, int(applicant.slowness * len(self.widths)))


class FedRolex(HeteroFL):
    """A window that rolls."""

    name: ClassVar[str] = "fedrolex"

    def start(self, size: int, version: int) -> int:
        """T mod n."""
        return version % size


class FjORD(HeteroFL):
    """Ordered dropout."""

    name: ClassVar[str] = "fjord"

    def width(self, applicant: Applicant) -> float:
        """A draw from the widths up to the device's own."""
        allowed = self.widths[self._level(applicant) :]
        return allowed[int(stream(applicant.seed, "width").integers(len(allowed)))]


def _count(size: int, width: float) -> int:
    return max(1, math.ceil(size * width - 1e-9))
