"""FedLuck: local steps and compression of each device together, by its speed and its link.

| symbol       | name                 | meaning                                                              |
|--------------|----------------------|----------------------------------------------------------------------|
| k            | local.steps          | local steps of a task                                                |
| delta        | kept                 | fraction of the values that travels (top-k, with error feedback)     |
| T            | period_s             | seconds of an aggregation                                            |
| alpha_i      | step_s / T           | a step of device i, in periods                                       |
| beta_i       | transfer / T         | the way of a whole model of device i, in periods                     |
| k_min, k_max | steps_min, steps_max | local steps that may be chosen                                       |
| rho          | down                 | how much of a whole model a task brings down                         |

    (k_i, delta_i) = argmin phi,   phi(k, delta) = ((k alpha_i + delta beta_i)^2 (2 - delta) + 1) / (k delta)

over k in [k_min, k_max] and the deltas of `kept`; of equals the fewest steps and then the largest delta. A
device that has not finished a task trains as `[client]` says and sends all values. Its paper aggregates
periodically: that is `fedbuff` with a buffer that does not fill and `flush_s` = T; here it goes with any
strategy.

phi weighs how far an update moves (k delta, below) against its age and what compression loses (above).
Where k may be as large as it would, all values travel; where k_max is in the way, fewer the slower the link
is.

Source: FedLuck, Euro-Par 2024; phi as in its authors' published code and appendix. Ours: that beta is
measured, and how: the part of a task's time in which the device did not train is the way of `down` of the
model one way and of delta the other, both at one speed; the grid of deltas; `bits`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar

from anabranch.core.engine.strategy import Context, Plan, State
from anabranch.core.errors import ConfigError
from anabranch.core.model.updates import LocalPlan
from anabranch.strategies.compression_schedule import BITS, Strength
from anabranch.strategies.parameters import (
    AT_LEAST_ONE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    check_parameters,
    one_of,
)
from anabranch.strategies.schedulers.capped import PLACE
from anabranch.strategies.schedulers.paces import DevicePace, PacedScheduler
from anabranch.strategies.schedulers.steps import check_steps

KEPT = (1.0, 0.5, 0.25, 0.1, 0.05, 0.01)


def phi(steps: int, kept: float, alpha: float, beta: float) -> float:
    """What a choice costs; alpha and beta in periods."""
    return ((steps * alpha + kept * beta) ** 2 * (2 - kept) + 1) / (steps * kept)


@dataclass(frozen=True)
class FedLuck(PacedScheduler):
    """Chooses steps and compression together. Symbols and equations: see the module."""

    name: ClassVar[str] = "fedluck"

    period_s: Annotated[float, POSITIVE] = 10.0
    steps_min: Annotated[int, AT_LEAST_ONE] = 1
    steps_max: Annotated[int, AT_LEAST_ONE] = 50
    kept: list[float] = field(default_factory=lambda: list(KEPT))
    bits: Annotated[int, one_of(BITS)] = 32
    down: Annotated[float, NOT_NEGATIVE] = 1.0
    feedback_decay: Annotated[float, FRACTION] = 1.0

    def __post_init__(self) -> None:
        check_parameters(self, PLACE)
        check_steps(self.steps_min, self.steps_max)
        if not self.kept or not all(0 < kept <= 1 for kept in self.kept):
            raise ConfigError(f"{PLACE}.kept must list fractions in (0, 1], at least one, not {self.kept!r}")

    @cached_property
    def deltas(self) -> list[float]:
        """The fractions that may be chosen, the largest first."""
        return sorted(set(self.kept), reverse=True)

    def chosen(self, alpha: float, beta: float) -> tuple[int, float]:
        """K and delta. For each delta phi is least at k = sqrt((delta beta)^2 + 1 / (2 - delta)) / alpha."""
        found = []
        for kept in self.deltas:
            best = math.hypot(kept * beta, math.sqrt(1 / (2 - kept))) / alpha
            least = math.floor(max(self.steps_min, min(self.steps_max, best)))  # first, as it may be infinite
            near = (least, min(self.steps_max, least + 1))
            found += [(phi(steps, kept, alpha, beta), steps, -kept) for steps in near]
        _, steps, kept = min(found)
        return steps, -kept

    def chain(self, kept: float) -> str:
        """By which an update of so many values travels; what is left out is made up for later."""
        chain = Strength(kept, self.bits).chain
        return f"ef({self.feedback_decay:g})|{chain}" if self.feedback_decay else chain

    def unpaced(self, plan: Plan) -> tuple[LocalPlan, str, float]:
        """All values."""
        return plan.local, self.chain(1.0), 1.0

    def paced(
        self, state: State, pace: DevicePace, plan: Plan, context: Context
    ) -> tuple[LocalPlan, str, float]:
        """The best of what there is."""
        whole_s = pace.transfer_s / (self.down + pace.sent)
        steps, kept = self.chosen(pace.step_s / self.period_s, whole_s / self.period_s)
        return replace(plan.local, steps=steps), self.chain(kept), kept
