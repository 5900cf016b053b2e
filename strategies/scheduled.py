"""A strategy whose tasks another part deals: `strategy.scheduler = {name = "...", ...}` (`schedulers/`).

Both have to admit a device. The strategy plans its task, then the scheduler, which may change how many
steps it has and by which chain its update travels. What becomes of the update is the strategy's, and so is
all else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, make_dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

from anabranch.core.engine.answers import (
    checked_decision,
    checked_plan,
    checked_refusal,
    checked_state,
    checked_task,
    checked_tick,
    plan_flaw,
)
from anabranch.core.engine.strategy import (
    Context,
    LongPartOf,
    Plan,
    Refusal,
    State,
    Step,
    Strategy,
    may_publish,
)
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import Ask, LocalPlan, Task, Update, Verdict
from anabranch.strategies.schedulers.scheduler import Scheduler

SCHEDULER_KEY = "scheduler"  # of any strategy's parameters


@lru_cache(maxsize=64)
def _state_of(types: tuple[type[Any], type[Any]]) -> type[Any]:
    """`schedule`: what a scheduler remembers; `rest`: what a strategy does."""
    parts = list(zip(("schedule", "rest"), types, strict=True))
    return make_dataclass("ScheduledState", parts, frozen=True, namespace={"__module__": __name__})


def _the_strategys(attribute: str) -> Any:
    return property(attrgetter(f"strategy.{attribute}"))


@dataclass(frozen=True)
class Scheduled:
    """`strategy`, whose tasks are dealt by `scheduler`. See the module."""

    strategy: Strategy
    scheduler: Scheduler

    name = _the_strategys("name")
    synchronous = _the_strategys("synchronous")
    rolls_back = _the_strategys("rolls_back")  # what a scheduler has learned it learns anew of what counts
    supports_submodels = _the_strategys("supports_submodels")
    submodel = _the_strategys("submodel")
    needs_base = _the_strategys("needs_base")
    mixes_models = _the_strategys("mixes_models")
    clip = _the_strategys("clip")

    @property
    def state_type(self) -> type[Any]:
        """With what both remember."""
        return _state_of((self.scheduler.state_type, self.strategy.state_type))

    @property
    def _scheduler(self) -> str:
        return f"scheduler {self.scheduler.name!r}"

    @property
    def _strategy(self) -> str:
        return f"strategy {self.name!r}"

    @property
    def keeps_updates(self) -> bool:
        """As the strategy, where that knows of it."""
        return bool(getattr(self.strategy, "keeps_updates", False))

    def downlink(self, version: int) -> str:
        """As the strategy."""
        return self.strategy.downlink(version)

    def is_synchronous(self, state: State) -> bool:
        """As the strategy."""
        return self.strategy.is_synchronous(state.rest)

    def init(self, vector: Vector) -> State:
        """Both at their beginning."""
        schedule = self._schedule(self.scheduler.init(), "init")
        return self.state_type(schedule, self._rest(self.strategy.init(vector), "init"))

    def selected(self, state: State) -> list[str] | None:
        """As the strategy."""
        return self.strategy.selected(state.rest)

    def timer(self, state: State) -> float | None:
        """As the strategy."""
        return self.strategy.timer(state.rest)

    # --- tasks -------------------------------------------------------------------------------

    def admit(self, state: State, ask: Ask, context: Context) -> Refusal | None:
        """Whoever both admit."""
        refusal = self.strategy.admit(state.rest, ask, context)
        return refusal or checked_refusal(self.scheduler.admit(state.schedule, ask, context), self._scheduler)

    def plan(self, state: State, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """The strategy's task, as the scheduler changes it."""
        own = self.strategy.plan(state.rest, ask, local, context)
        planned = checked_task(own, self._strategy, self.strategy.state_type, local)
        found = self.scheduler.plan(state.schedule, ask, planned, context)
        dealt = checked_plan(found, self._scheduler, self.scheduler.state_type)
        # The ask is in the log: no error may stop it.
        if plan_flaw(dealt, planned.local):
            dealt = replace(dealt, local=planned.local, uplink=planned.uplink)
        return replace(dealt, state=_with(state, dealt.state, planned.state))

    def on_lost(self, state: State, task: Task, context: Context) -> State:
        """Both are told."""
        schedule = self._schedule(self.scheduler.lost(state.schedule, task, context), "lost")
        return _with(state, schedule, self._rest(self.strategy.on_lost(state.rest, task, context), "on_lost"))

    def reopened(self, state: State, training: Collection[str]) -> State:
        """Both are told."""
        schedule = self._schedule(self.scheduler.reopened(state.schedule, training), "reopened")
        return _with(state, schedule, self._rest(self.strategy.reopened(state.rest, training), "reopened"))

    # --- updates -----------------------------------------------------------------------------

    def step(self, state: State, vector: Vector, update: Update, context: Context) -> Step:
        """The strategy's; of an update that counts the scheduler is told."""
        step = checked_decision(self.strategy.step(state.rest, vector, update, context), self._strategy)
        if step.decision is not None and step.decision.verdict is Verdict.REJECTED:
            return replace(step, state=state)
        schedule = self._schedule(self.scheduler.arrived(state.schedule, update, context), "arrived")
        return replace(step, state=_with(state, schedule, step.state))

    def long_part(self, state: State, vector: Vector, update: Update, context: Context) -> LongPartOf | None:
        """The strategy's."""
        return self.strategy.long_part(state.rest, vector, update, context)

    def long_in(self, state: State, context: Context) -> int:
        """As in the strategy."""
        long_in = getattr(self.strategy, "long_in", None)  # there are older ones of others
        return 0 if long_in is None else long_in(state.rest, context)

    def may_publish(self, state: State, context: Context) -> bool:
        """As the strategy."""
        return may_publish(self.strategy, state.rest, context)

    def on_timer(self, state: State, vector: Vector, context: Context) -> Step | None:
        """The strategy's."""
        found = self.strategy.on_timer(state.rest, vector, context)
        step = checked_tick(found, self._strategy, self.strategy.state_type, context.spec)
        return None if step is None else replace(step, state=_with(state, state.schedule, step.state))

    def shifted(self, state: State, versions: int) -> State:
        """Both are told."""
        schedule = self._schedule(self.scheduler.shifted(state.schedule, versions), "shifted")
        return _with(state, schedule, self._rest(self.strategy.shifted(state.rest, versions), "shifted"))

    def _schedule(self, found: State, method: str) -> State:
        return checked_state(found, f"{self._scheduler}: {method}", self.scheduler.state_type)

    def _rest(self, found: State, method: str) -> State:
        return checked_state(found, f"{self._strategy}: {method}", self.strategy.state_type)


def _with(state: State, schedule: State, rest: State) -> State:
    # The same state where nothing has changed: what was made of it beforehand still counts.
    same = schedule is state.schedule and rest is state.rest
    return state if same else replace(state, schedule=schedule, rest=rest)


def unscheduled(strategy: Strategy) -> Strategy:
    """The strategy itself, whoever deals its tasks."""
    return strategy.strategy if isinstance(strategy, Scheduled) else strategy


def parameters_of(strategy: Strategy) -> dict[str, Any]:
    """What `[strategy]` says of it, by key; of a scheduler as a table."""
    found = dict(vars(unscheduled(strategy)))
    return (
        {**found, SCHEDULER_KEY: dict(vars(strategy.scheduler))} if isinstance(strategy, Scheduled) else found
    )
