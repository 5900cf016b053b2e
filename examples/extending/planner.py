"""A planner of one's own: slow devices train every other unit, in turn; fast ones all."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from anabranch.core.engine.planner import Applicant
from anabranch.core.model.params import Vector
from anabranch.strategies.submodels.planner import GroupPlanner, Units


class OddEven(GroupPlanner):
    name: ClassVar[str] = "odd_even"

    def kept(self, state: Any, vector: Vector, applicant: Applicant) -> list[Units]:
        if applicant.slowness is not None and applicant.slowness < 0.5:
            return [np.arange(group.size) for group in self.spec.groups]
        first = applicant.version % 2
        return [np.arange(min(first, group.size - 1), group.size, 2) for group in self.spec.groups]
