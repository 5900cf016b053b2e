"""A cap on how many devices train at a time, as a part of the fleet: TEASQ-Fed's C.

    admit while live tasks < max(least, ceil(fraction N))

`server.concurrency` is such a cap as a number, for a fleet whose size is known.

Source: TEA-Fed and TEASQ-Fed (Jia et al., arXiv 2312.15186): that a control parameter bounds who trains at a
time is in its abstract, ceil(C N) is recalled; that `least` devices may is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from anabranch.core.engine.strategy import Context, Refusal, State
from anabranch.core.model.updates import Ask, Reason
from anabranch.core.shares import ceil_of
from anabranch.strategies.parameters import AT_LEAST_ONE, POSITIVE_FRACTION, check_parameters
from anabranch.strategies.schedulers.scheduler import OpenScheduler

FEW = 4  # devices that train at a time in a small fleet
PLACE = "strategy.scheduler"


def at_capacity(context: Context, cap: int) -> Refusal | None:
    """A refusal where `cap` devices are in training."""
    if context.live_tasks < cap:
        return None
    return Refusal(Reason.AT_CAPACITY, f"{context.live_tasks} of {cap} devices are in training", cap)


@dataclass(frozen=True)
class Capped(OpenScheduler):
    """Lets a part of the fleet train at a time. See the module."""

    name: ClassVar[str] = "capped"

    fraction: Annotated[float, POSITIVE_FRACTION] = 0.1
    least: Annotated[int, AT_LEAST_ONE] = FEW

    def __post_init__(self) -> None:
        check_parameters(self, PLACE)

    def admit(self, state: State, ask: Ask, context: Context) -> Refusal | None:
        """As long as fewer devices than may be are in training."""
        cap = ceil_of(self.fraction, len(context.clients), context.rules)
        return at_capacity(context, max(self.least, cap))
