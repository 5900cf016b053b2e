"""Ends of a run, as strategies of one's own: a rate that decays, and rounds at last.

| symbol | name        | meaning                                             |
|--------|-------------|-----------------------------------------------------|
| t      | context.now | virtual seconds since the run began                 |
| T      | horizon_s   | how long the run is, which it knows                 |
| n      | version     | versions so far                                     |
| d      | decay       | 1 / d versions halve the rate                       |
| l      | last        | the part of the run that is by rounds               |

    cosine    r = (1 + cos(pi t / T)) / 2
    decaying  r = 1 / (1 + d n)
    closing   buffers while t < (1 - l) T, then rounds

r is a factor of the mean D before the server's optimiser: w <- w + lr r D, and with momentum m <- mu m + r D.
`cosine_tasks` is the control: it leaves the server alone, and a task's learning rate is r times its own, by
sixteenths of the run.

Of `closing`, what the buffer holds when its time is over becomes a version, and the rounds begin without
momentum. Updates of tasks from before are of no round: they are refused, and their devices' work is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from anabranch.core.engine.strategy import Context, Plan, State, Step
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import Ask, LocalPlan
from anabranch.strategies.buffer import Aggregate, BufferStrategy
from anabranch.strategies.fedavg import FedAvg
from anabranch.strategies.fedbuff import FedBuff
from anabranch.strategies.parameters import LESS_THAN_ONE, NOT_NEGATIVE, POSITIVE
from anabranch.strategies.phased import Phased
from anabranch.strategies.registry import STRATEGIES

HORIZON = "horizon_s"  # what a row's runs are told of how long they are
LEVELS = 16  # of a task's rate, so that tasks of one may be trained as a stack


def cosine(now: float, horizon: float) -> float:
    """From 1 at the beginning to 0 at the end, and after it."""
    return (1.0 + math.cos(math.pi * min(1.0, now / horizon))) / 2


class Falling(BufferStrategy):
    """A buffer or a round whose mean counts less and less."""

    def rate(self, context: Context) -> float:
        """What the mean is multiplied by: r."""
        raise NotImplementedError

    def aggregate(self, state: State, vector: Vector, context: Context) -> Aggregate:
        """The mean, times r."""
        found = super().aggregate(state, vector, context)
        return found._replace(total=found.total * self.rate(context))


@dataclass(frozen=True)
class FallingByCosine(Falling):
    """One whose rate falls as a cosine until the end."""

    horizon_s: Annotated[float, POSITIVE] = 200.0

    def rate(self, context: Context) -> float:
        """By the time."""
        return cosine(context.now, self.horizon_s)


@dataclass(frozen=True)
class CosineBuffer(FallingByCosine, FedBuff):
    """FedBuff by a cosine."""

    name: ClassVar[str] = "cosine_buffer"


@dataclass(frozen=True)
class CosineRounds(FallingByCosine, FedAvg):
    """FedAvg by a cosine."""

    name: ClassVar[str] = "cosine_rounds"


@dataclass(frozen=True)
class DecayingBuffer(Falling, FedBuff):
    """FedBuff whose rate falls with the versions, without knowing the end."""

    name: ClassVar[str] = "decaying_buffer"

    decay: Annotated[float, NOT_NEGATIVE] = 0.01

    def rate(self, context: Context) -> float:
        """By the number of the version that is replaced."""
        return 1.0 / (1.0 + self.decay * context.version)


@dataclass(frozen=True)
class CosineTasks(FedBuff):
    """FedBuff whose devices' learning rate falls as a cosine until the end."""

    name: ClassVar[str] = "cosine_tasks"

    horizon_s: Annotated[float, POSITIVE] = 200.0

    def plan(self, state: State, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """With the rate of the middle of the sixteenth of the run in which the task begins."""
        begun = min(LEVELS - 1, int(LEVELS * context.now / self.horizon_s))
        rate = cosine(begun + 0.5, LEVELS)
        return super().plan(state, ask, replace(local, learning_rate=rate * local.learning_rate), context)


@dataclass(frozen=True)
class Closing(Phased):
    """Two phases, the second of rounds, by the time that is left."""

    name: ClassVar[str] = "closing"

    last: Annotated[float, LESS_THAN_ONE] = 0.2
    horizon_s: Annotated[float, POSITIVE] = 200.0

    def __post_init__(self) -> None:
        """The phases have no ends of their own."""

    def _is_over(self, state: State, *_: int) -> bool:
        return bool(state.phase == 0)

    def _after(self, state: State, step: Step, vector: Vector, context: Context) -> Step:
        """The step, and rounds where their time has come."""
        if state.phase or context.now < (1.0 - self.last) * self.horizon_s:
            return replace(step, state=self._remembers(state, step.state))
        return super()._after(state, step, vector, context)


ENDINGS = {own.name: own for own in (CosineBuffer, CosineRounds, DecayingBuffer, CosineTasks, Closing)}


def let_in(name: str) -> None:
    """Have settings name a strategy of here, if this is one: whoever imports the rows need not know them."""
    if name in ENDINGS:
        STRATEGIES.named(ENDINGS[name])
