"""Sub-models as wide as a device is fast: HeteroFL, FedRolex and FjORD. None of this is AsyncDrop's.

| symbol | name       | meaning                                                                       |
|--------|------------|-------------------------------------------------------------------------------|
| n      | size       | units of a group                                                              |
| s      | widths     | the widths there are, as fractions of n, the widest first                     |
| r      |            | the device's own                                                              |
| k      |            | ceil(r n) units are kept, floor(w n) at most                                  |
| t      | version    | version of the model                                                          |
| x(s)   | share      | of the parameters that are in a sub-model of that width                       |
| a + bx | step_time  | how long the device's steps take, 1: as long as a fast one's of the whole     |
| w      | width_max  | the share of the units that the device's memory bears                         |

    r = the first s <= w with a + b x(s) <= SLOWER max(1, a + b x(s_last))

    heterofl:  the first k units
    fedrolex:  k units from unit t mod n on, going round
    fjord:     the first k units, r drawn for each task from the widths that are not over the device's own

Sources: Diao, Ding and Tarokh, "HeteroFL", ICLR 2021; Alam, Liu, Yan and Zhang, "FedRolex", NeurIPS 2022;
Horvath, Laskaridis, Almeida, Leontiadis, Venieris and Lane, "FjORD", NeurIPS 2021: all recalled, not read.
What they add to the choice of units is not here: HeteroFL's scaler, masked loss and static norms, FjORD's
self-distillation. FedRolex rolls once a round, here once a version.

By whom which width is trained is ours: a device gets the widest by which it is hardly slower than a fast
device with the whole model (`core/engine/step_times.py`), or than it would be itself with the narrowest. So
an even fleet trains whole models, and nobody trains less of it where that saves no time. The first
`TASKS_FIRST` tasks of a device are of its widest, as its speed is not known before, and every
`TASKS_ANEW`-th, so that a device that was slow for a time finds out. With `submodel.step_time =
"proportional"` it is as in runs of older releases: steps are taken to be as long as their part is large, the
fastest devices get s_1, the next s_2, in equal shares, and those of unknown speed the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from anabranch.core.config.ranges import LINEAR
from anabranch.core.config.tables import SubmodelTable
from anabranch.core.engine.planner import Applicant, Narrowest
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.submodels import unit_map
from anabranch.core.model.units import units_at_most
from anabranch.core.rng import stream
from anabranch.core.shares import ceil_of
from anabranch.strategies.submodels.planner import GroupPlanner, Units, of_smallest_group

SLOWER = 1.25  # so many times as long as a fast device's steps are hardly longer
TASKS_FIRST, TASKS_ANEW = 3, 8


class HeteroFL(GroupPlanner):
    """The first units. `times_steps`: widths by what steps take; else by the device's place in the fleet."""

    name: ClassVar[str] = "heterofl"

    def __init__(
        self,
        spec: ParamSpec,
        widths: Sequence[float],
        coverage_versions: int = 0,
        times_steps: bool = True,
    ) -> None:
        super().__init__(spec, coverage_versions)
        self.widths, self.times_steps = sorted(widths, reverse=True), times_steps

    @classmethod
    def of(cls, spec: ParamSpec, table: SubmodelTable, seed: int) -> Self:
        """By the `[submodel]` table."""
        return cls(spec, table.widths, table.coverage_versions, table.step_time == LINEAR)

    def kept(self, state: Any, vector: Vector, applicant: Applicant) -> list[Units]:
        """K units of each group from where the method begins."""
        width, found = self.width(applicant), []
        for n in (group.size for group in self.spec.groups):
            k = min(_count(n, width), units_at_most(n, applicant.width_max))
            found.append((self.start(n, applicant.version) + np.arange(k)) % n)
        return found

    def width(self, applicant: Applicant) -> float:
        """R."""
        return self.widths[self._level(applicant)]

    def start(self, size: int, version: int) -> int:
        """The first unit that is kept."""
        return 0

    def narrowest(self) -> Narrowest:
        """The last of the widths, where that is a unit of every group at least."""
        least = of_smallest_group(self.spec)
        width = self.widths[-1]
        return least if width < least.width else Narrowest(width, "the narrowest of submodel.widths")

    def _level(self, applicant: Applicant) -> int:
        """By its speed, and no wider than its memory bears."""
        too_wide = sum(s > applicant.width_max for s in self.widths)
        return max(min(too_wide, len(self.widths) - 1), self._level_by_speed(applicant))

    def _level_by_speed(self, applicant: Applicant) -> int:
        last, turn, time = len(self.widths) - 1, applicant.turn, applicant.step_time
        if not self.times_steps:
            q = applicant.slowness
            return last if q is None else min(last, int(q * len(self.widths)))
        if time is None or turn < TASKS_FIRST or turn % TASKS_ANEW == 0:
            return 0
        takes = [time.at(share) for share in self._shares]
        longest = SLOWER * max(1.0, takes[-1])
        return next(level for level, of in enumerate(takes) if of <= longest)

    @cached_property
    def _shares(self) -> list[float]:
        """X of each width."""
        kept = [[range(_count(group.size, s)) for group in self.spec.groups] for s in self.widths]
        return [unit_map(self.spec, units).size / self.spec.size for units in kept]


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
    return max(1, ceil_of(width, size))
