"""Strategies by composition: a paper's file says what its paper says; how that is put together is here.

| part      | what it decides                  | where a strategy says it                                    |
|-----------|----------------------------------|-------------------------------------------------------------|
| refuse    | which updates are not used       | `refuse`: those over its parameter `staleness_max`          |
| weigh     | how much an update counts        | `weight`: S(tau), S of the parameter `staleness`            |
| buffer    | how updates wait for each other, | its base: `MixingStrategy` (they do not), `BufferStrategy`  |
|           | and how long                     | (as a sum), `CacheStrategy` (one by one), `FedAvg` (rounds) |
| rule      | what they come to together       | the mean, or the parameter `rule`, which is `[robust]`'s    |
| optimiser | what step of the model that is   | `optimiser`                                                 |
| add, mix  | whether the model goes along it, | its base: a buffer and a round add, a cache does unless it  |
|           | or towards models                | needs w_base                                                |

    update -> refuse -> weigh -> gather -> full? -> apply -> version

A parameter is a field, and a key of `[strategy]`. One of a part that a strategy does not declare has the
part's own value: no bound of staleness, S = 1, K = 1, no flush, no rule. What a strategy has to remember
beyond what its parts do is in more fields of a state that inherits theirs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property

import numpy as np

from anabranch.core.engine.strategy import (
    AsyncStrategy,
    Context,
    LongPartOf,
    Refusal,
    State,
    Step,
    held,
    published,
    rejected,
)
from anabranch.core.errors import AppError
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import Reason, Update
from anabranch.strategies.parameters import check_parameters
from anabranch.strategies.robust.rule import Combined, Rule
from anabranch.strategies.staleness import StalenessFunction, make_staleness

NOTHING = np.empty(0)  # whether a buffer is full does not depend on values


class ComposedStrategy(AsyncStrategy, ABC):
    """What becomes of an update: it is refused or weighed, then folded."""

    def __post_init__(self) -> None:
        check_parameters(self)
        _ = self.s

    @cached_property
    def s(self) -> StalenessFunction:
        """S: of the parameter `staleness`; 1 where there is none."""
        return make_staleness(getattr(self, "staleness", {"name": "constant"}))

    @property
    def staleness_max(self) -> int:
        """Updates of more versions are not used; 0: all are."""
        return 0

    def refuse(self, update: Update, context: Context) -> Refusal | None:
        """Why an update is not used."""
        if not self.staleness_max or context.staleness <= self.staleness_max:
            return None
        detail = f"staleness {context.staleness} is over the bound of {self.staleness_max} versions"
        return Refusal(Reason.STALE, detail)

    def refuse_in(self, state: State, update: Update, context: Context) -> Refusal | None:
        """The same, where it depends on the state as well."""
        return self.refuse(update, context)

    def weight(self, update: Update, context: Context) -> float:
        """How much an update counts; its device is told."""
        return self.s(context.staleness)

    def weight_in(self, vector: Vector, update: Update, context: Context) -> float:
        """The same, where it depends on the model, shape (size,), as well."""
        return self.weight(update, context)

    @abstractmethod
    def fold(self, state: State, vector: Vector, update: Update, weight: float, context: Context) -> Step:
        """Take an update: a step with a vector publishes, one without holds it."""

    def step(self, state: State, vector: Vector, update: Update, context: Context) -> Step:
        """The parts, in their order."""
        refusal = self.refuse_in(state, update, context)
        if refusal is not None:
            return Step(state, None, rejected(context.staleness, refusal.reason, refusal.detail))
        weight = self.weight_in(vector, update, context)
        if not math.isfinite(weight):
            raise AppError(
                f"strategy {type(self).__name__}: an update of staleness {context.staleness} weighs "
                f"{weight}, not a finite number"
            )
        step = self.fold(state, vector, update, weight, context)
        decision = (held if step.vector is None else published)(context.staleness, weight)
        return Step(step.state, step.vector, decision, step.dropped, step.heard)


class GatheringStrategy(ComposedStrategy):
    """Updates are gathered, and applied together when there are enough, or when the oldest has waited."""

    @property
    def flush_s(self) -> float:
        """So long after its oldest update a buffer is applied although it is not full; 0: never."""
        return 0.0

    @property
    def rule(self) -> Rule | None:
        """The robust rule in the place of the mean."""
        return None

    @property
    def keeps_updates(self) -> bool:
        """With a rule, until it takes them; else they become a sum."""
        return self.rule is not None

    @abstractmethod
    def gather(self, state: State, update: Update, weight: float, context: Context) -> State:
        """The state with an update more."""

    @abstractmethod
    def full(self, state: State, context: Context) -> bool:
        """Whether what is gathered is applied now."""

    @abstractmethod
    def apply(self, state: State, vector: Vector, context: Context) -> Step:
        """What is gathered becomes a version, and an empty state."""

    def replaced(self, state: State, update: Update) -> tuple[str, ...]:
        """The ids of updates that were gathered, and whose place this one takes."""
        return ()

    def combined(self, state: State, vector: Vector, context: Context) -> Combined:
        """What the rule makes of what is gathered; writes to no array."""
        raise NotImplementedError(f"{type(self).__name__} has a rule: say what that is given")

    def by_rule(self, state: State, vector: Vector, context: Context) -> Combined:
        """The same, which may have been made before the step."""
        made: Combined | None = context.beforehand
        return self.combined(state, vector, context) if made is None else made

    def lacking(self, state: State, context: Context) -> int:
        """How many more updates, at least, are enough."""
        return 1

    def long_in(self, state: State, context: Context) -> int:
        """With a rule, that of the one which is enough."""
        return 0 if self.rule is None else max(1, self.lacking(state, context))

    def long_part(self, state: State, vector: Vector, update: Update, context: Context) -> LongPartOf | None:
        """What a rule makes of a buffer that this update fills."""
        if self.rule is None or context.sums is not None:
            return None
        if self.refuse_in(state, update, context) is not None:
            return None
        bare = replace(update, delta=NOTHING), 1.0, replace(context, base=NOTHING)
        if not self.full(self.gather(state, *bare), context):
            return None

        def combined(it: Update) -> Combined:
            weight = self.weight_in(vector, it, context)
            return self.combined(self.gather(state, it, weight, context), vector, context)

        return combined

    def may_publish(self, state: State, context: Context) -> bool:
        """Where one update more may be enough, and with a `step` or a `fold` of others."""
        kind, own = type(self), GatheringStrategy
        changed = kind.step is not own.step or kind.fold is not own.fold
        return changed or self.lacking(state, context) <= 1

    def fold(self, state: State, vector: Vector, update: Update, weight: float, context: Context) -> Step:
        """Gather; apply what is enough."""
        dropped = self.replaced(state, update)
        state = self.gather(state, update, weight, context)
        if not self.full(state, context):
            return Step(state, dropped=dropped)
        # There are older ones of others, which are full before `lacking` says that they may be.
        own = vector if vector.flags.writeable else vector.copy()
        return replace(self.apply(state, own, context), dropped=dropped)

    def timer(self, state: State) -> float | None:
        """When the oldest update has waited for `flush_s`."""
        return state.since + self.flush_s if self.flush_s and state.since is not None else None

    def on_timer(self, state: State, vector: Vector, context: Context) -> Step:
        """Apply what there is."""
        return self.apply(state, vector, context)
