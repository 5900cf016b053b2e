"""Annealed buffers: a version is the mean of a fixed part of all updates so far.

| symbol  | name              | meaning                                                        |
|---------|-------------------|----------------------------------------------------------------|
| n       | state.taken       | updates that are in versions                                   |
| rho     | growth            | the part of them that a buffer has                             |
| K_0     | buffer_size       | updates in a buffer at the least                               |
| s       | staleness         | staleness function                                             |
| tau_i   | context.staleness | versions since device i started                                |
| Delta_i | update.delta      | w_i - w_base of device i                                       |
| eta     | server_lr         | server learning rate                                           |
| -       | outer             | another server optimiser, in its place                         |

    K = max(K_0, floor(rho n))
    D = sum_i s(tau_i) Delta_i / sum_i s(tau_i)
    w <- w + eta D

FedBuff's K decides two things: how often the model moves, and how much of one step is the luck of who has
come. A young model gains by moving often, an old one is shaken by it. Here K grows with the run, by what it
has seen and not by what is left of it, so a run that goes on is as one that was meant to be longer. As
versions become rarer updates become less stale as well. What all weigh together is divided out, so that
staleness makes no step shorter, which it does with FedBuff. Of parts of the model each coordinate has the
mean of those that cover it.

Source: ours. That a growing batch does what a falling rate does is Smith et al., "Don't decay the learning
rate, increase the batch size", ICLR 2018; the buffer is FedBuff's. Measured in benchmarks/arena.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from anabranch.core.engine.strategy import Context, State
from anabranch.core.shares import floor_of
from anabranch.strategies.buffer import WeighedBuffer, WeighedState
from anabranch.strategies.optimisers import Optimiser, Sgd, outer_in_place
from anabranch.strategies.parameters import AT_LEAST_ONE, LESS_THAN_ONE, NOT_NEGATIVE, POSITIVE


@dataclass(frozen=True)
class AnnealedState(WeighedState):
    """A buffer's; `share`: sum of s(tau_i); `taken`: n."""

    taken: int = 0


@dataclass(frozen=True)
class Annealed(WeighedBuffer):
    """Gathers a fixed part of all updates so far, and adds their mean by staleness.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "annealed"
    state_type: ClassVar[type[Any]] = AnnealedState

    buffer_size: Annotated[int, AT_LEAST_ONE] = 5
    growth: Annotated[float, LESS_THAN_ONE] = 0.02
    server_lr: Annotated[float, POSITIVE] = 1.0
    flush_s: Annotated[float, NOT_NEGATIVE] = 0.0
    staleness: Mapping[str, Any] = field(default_factory=lambda: {"name": "polynomial", "a": 0.5})
    outer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def optimiser(self) -> Optimiser:
        """Plain, by eta, or `outer`."""
        return outer_in_place(self, {"server_lr": "lr"}, Sgd(self.server_lr))

    def full(self, state: State, context: Context) -> bool:
        """With K updates."""
        return bool(state.count >= max(self.buffer_size, floor_of(self.growth, state.taken, context.rules)))

    def emptied(self, state: State, context: Context) -> State:
        """The state for the next buffer."""
        return replace(super().emptied(state, context), taken=state.taken + state.count)
