"""Local steps by which every device's task takes as long: fast devices train more, slow ones less.

| symbol       | name                 | meaning                                                    |
|--------------|----------------------|------------------------------------------------------------|
| T            | task_s               | seconds that a task is to take, with its way               |
| a_i, c_i     | paces (`paces.py`)   | seconds of a step, and of the way, of device i             |
| k_min, k_max | steps_min, steps_max | local steps of a task                                      |

    k_i = floor((T - c_i) / a_i), at least k_min, at most k_max

A device that has not finished a task trains as `[client]` says. Ours; FedCompass (Li et al., ICLR 2024) gives
steps by speed as well, so that a group arrives together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from anabranch.core.engine.strategy import Context, Plan
from anabranch.core.model.updates import LocalPlan
from anabranch.strategies.parameters import AT_LEAST_ONE, POSITIVE, check_parameters
from anabranch.strategies.schedulers.capped import PLACE
from anabranch.strategies.schedulers.paces import DevicePace, PacedScheduler
from anabranch.strategies.schedulers.steps import check_steps


@dataclass(frozen=True)
class EqualTime(PacedScheduler):
    """Gives each device as many steps as it takes in `task_s`. See the module."""

    name: ClassVar[str] = "equal_time"

    task_s: Annotated[float, POSITIVE] = 10.0
    steps_min: Annotated[int, AT_LEAST_ONE] = 1
    steps_max: Annotated[int, AT_LEAST_ONE] = 100

    def __post_init__(self) -> None:
        check_parameters(self, PLACE)
        check_steps(self.steps_min, self.steps_max)

    def paced(
        self, pace: DevicePace, client_id: str, plan: Plan, context: Context
    ) -> tuple[LocalPlan, str, float]:
        """k_i, and the strategy's own chain."""
        steps = (self.task_s - pace.transfer_s) / pace.step_s
        whole = math.floor(max(self.steps_min, min(self.steps_max, steps)))  # first, as it may be infinite
        return replace(plan.local, steps=whole), plan.uplink, 1.0
