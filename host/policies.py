"""When a device that trains on pushes what it has. Pure: one question after every local step.

| name         | pushes                                                                                    |
|--------------|-------------------------------------------------------------------------------------------|
| `interval`   | every `steps` steps                                                                       |
| `continuous` | as soon as the exchanges have taken no more than the fraction `duty` of the time          |
| `change`     | when the local steps change their size: the gate of SelSync; experimental                 |
| `advised`    | when the server says so (`UPLOAD_NOW`)                                                    |

One exchange is in flight at a time: while there is, nothing is due. The server's advice counts under every
policy. `steps` is the least that the last three push, `steps_max` the longest that the last two stay silent.

The gate (SelSync, arXiv 2307.07950) is computed from one moving average, not from the twice smoothed one of
its released code, which falls silent for good; and from the local steps, which are the gradients
times the learning rate where there is no momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from anabranch.core.config.tables import ClientTable
from anabranch.core.errors import ConfigError

EWMA_WEIGHT = 0.16  # of the newest step


@dataclass(frozen=True)
class ExchangeState:
    """How things stand after a local step.

    `steps`: since the last snapshot. `seconds`: since the last exchange ended, which took `exchange_s`.
    `ready`: no exchange is in flight. `advised`: the server wants what there is. `step_norm2`: the squared
    length of this step, for a policy that `watches_steps`; None where it is not known.
    """

    steps: int
    seconds: float
    exchange_s: float
    ready: bool = True
    advised: bool = False
    step_norm2: float | None = None


class PushPolicy(Protocol):
    """Asked after every local step; may remember what it saw."""

    watches_steps: ClassVar[bool]

    def due(self, since: ExchangeState) -> bool:
        """Whether to push now. Never while an exchange is in flight."""
        ...


@dataclass(frozen=True)
class EverySteps:
    """Every `steps` steps."""

    watches_steps: ClassVar[bool] = False
    steps: int

    def due(self, since: ExchangeState) -> bool:
        """After so many steps."""
        return since.ready and since.steps >= (1 if since.advised else self.steps)


@dataclass(frozen=True)
class Continuous:
    """One exchange after the other, with a pause that keeps the link free for the rest of the time."""

    watches_steps: ClassVar[bool] = False
    duty: float
    steps: int = 1

    def due(self, since: ExchangeState) -> bool:
        """Once the pause has been as long as `duty` wants it for an exchange of this length."""
        if not since.ready or since.steps < 1:
            return False
        rested = since.seconds >= since.exchange_s * (1.0 / self.duty - 1.0)
        return since.advised or (rested and since.steps >= self.steps)


@dataclass
class OnChange:
    """When the moving average of the steps' squared lengths changes by more than `change` of itself."""

    watches_steps: ClassVar[bool] = True
    change: float
    steps: int
    steps_max: int
    _mean: float | None = None
    _changed: bool = False

    def due(self, since: ExchangeState) -> bool:
        """After a change, on advice, or after a long silence."""
        if since.step_norm2 is not None:
            before = self._mean if self._mean is not None else since.step_norm2
            self._mean = before + EWMA_WEIGHT * (since.step_norm2 - before)
            self._changed |= abs(self._mean - before) > self.change * before
        wanted = (self._changed and since.steps >= self.steps) or since.steps >= self.steps_max
        due = since.ready and since.steps >= 1 and (wanted or since.advised)
        self._changed &= not due
        return due


@dataclass(frozen=True)
class OnAdvice:
    """When the server says so, or after a long silence."""

    watches_steps: ClassVar[bool] = False
    steps: int
    steps_max: int

    def due(self, since: ExchangeState) -> bool:
        """On advice once there are `steps` steps, or at `steps_max`."""
        return since.ready and since.steps >= (self.steps if since.advised else self.steps_max)


def make_policy(table: ClientTable) -> PushPolicy:
    """The policy of `client.push_when`. Raises `ConfigError`."""
    match table.push_when:
        case "interval":
            return EverySteps(table.push_steps)
        case "continuous":
            return Continuous(table.push_duty, table.push_steps)
        case "change":
            return OnChange(table.push_change, table.push_steps, table.push_steps_max)
        case "advised":
            return OnAdvice(table.push_steps, table.push_steps_max)
    raise ConfigError(f"client.push_when {table.push_when!r} is not known here: install the server's version")
