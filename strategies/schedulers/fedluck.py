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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar

from anabranch.core.engine.strategy import Context, Plan
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import STEP_WORD, parse_chain
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

# Stages that leave values out: how many stay is their first argument.
SPARSE = ("topk", "deadzone", "threshold", "mask")
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

    def chosen(self, alpha: float, beta: float, deltas: Sequence[float] = ()) -> tuple[int, float]:
        """K and delta. For each delta phi is least at k = sqrt((delta beta)^2 + 1 / (2 - delta)) / alpha."""
        found = []
        for kept in deltas or self.deltas:
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

    def deltas_for(self, client_id: str, context: Context) -> list[float]:
        """Those by whose chains the device's updates would travel; if none does, that of what they travel by.

        `[uplink] codec` may name a chain, and a device may lack a stage and send all values.
        """
        heard = [d for d in self.deltas if context.uplink_for(client_id, self.chain(d)) == self.chain(d)]
        return heard or [kept_by(context.uplink_for(client_id, self.chain(1.0)))]

    def unpaced(self, client_id: str, plan: Plan, context: Context) -> tuple[LocalPlan, str, float]:
        """All values."""
        chain = self.chain(1.0)
        return plan.local, chain, kept_by(context.uplink_for(client_id, chain))

    def paced(
        self, pace: DevicePace, client_id: str, plan: Plan, context: Context
    ) -> tuple[LocalPlan, str, float]:
        """The best of what there is."""
        whole_s = pace.transfer_s / (self.down + pace.sent)
        alpha, beta = pace.step_s / self.period_s, whole_s / self.period_s
        steps, kept = self.chosen(alpha, beta, self.deltas_for(client_id, context))
        return replace(plan.local, steps=steps), self.chain(kept), kept


def kept_by(chain: str) -> float:
    """Which fraction of the values an update has that travels by a chain; 1 of one that does not say it."""
    said = [s.arguments[0] for s in parse_chain(chain) if s.name in SPARSE and s.arguments]
    return math.prod(float(fraction) for fraction in said if fraction != STEP_WORD)
