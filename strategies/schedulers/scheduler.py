"""The interface of a scheduler: who gets the next task, how many steps it has, how its update travels.

What becomes of the update is the strategy's; which part of the model a task is of, a planner's. Like a
strategy a scheduler is a frozen dataclass of its parameters, pure, and what changes is in its state, which is
data. It is told of each task that was granted, taken or lost:

    ask    -> both admit it? the strategy's plan, then the scheduler's, which may change steps and chain
    update -> the strategy's step, then `arrived`, unless the update was rejected

So one goes with any strategy: `strategy.scheduler = {name = "...", ...}` (`scheduled.py`). Some strategies
schedule by themselves, where the schedule is half of the rule: FedAvg's cohorts end its rounds, FedCompass's
arrival groups make its versions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from anabranch.core.engine.strategy import Context, Plan, Refusal, State
from anabranch.core.model.updates import Ask, Task, Update


class Scheduler(Protocol):
    """Laws, checked by `anabranch.testing.SchedulerConformance`: those of a strategy.

    No clock but `context.now`, equal calls give equal results, the state is data, `admit` changes nothing.
    """

    name: ClassVar[str]

    @property
    def state_type(self) -> type[Any]:
        """What its states are: a dataclass."""
        ...

    def init(self) -> State:
        """The state before the first task."""
        ...

    def admit(self, state: State, ask: Ask, context: Context) -> Refusal | None:
        """Why this device may have no task now; None: it may."""
        ...

    def plan(self, state: State, ask: Ask, plan: Plan, context: Context) -> Plan:
        """The task of an admitted ask. `plan` is the strategy's; the result has the scheduler's state."""
        ...

    def arrived(self, state: State, update: Update, context: Context) -> State:
        """An update was taken; `context.version` is the one before any that it makes."""
        ...

    def lost(self, state: State, task: Task, context: Context) -> State:
        """A task ended without an update of use."""
        ...

    def reopened(self, state: State, training: Collection[str]) -> State:
        """The run goes on after its end, in which no lost task was told; these clients have a task."""
        ...

    def shifted(self, state: State, versions: int) -> State:
        """The state in which every version has a number that is higher by `versions`."""
        ...


@dataclass(frozen=True)
class NothingKnown:
    """The state of a scheduler that remembers nothing."""


class OpenScheduler:
    """The habits of a scheduler that knows nothing: everybody is welcome, tasks are as the strategy has them.

    A base class to inherit defaults from; the contract is `Scheduler`.
    """

    state_type: ClassVar[type[Any]] = NothingKnown

    def init(self) -> State:
        """Nothing."""
        return self.state_type()

    def admit(self, state: State, ask: Ask, context: Context) -> Refusal | None:
        """Admit."""
        return None

    def plan(self, state: State, ask: Ask, plan: Plan, context: Context) -> Plan:
        """As the strategy has it."""
        return Plan(state, plan.local, plan.uplink)

    def arrived(self, state: State, update: Update, context: Context) -> State:
        """Nothing is learned."""
        return state

    def lost(self, state: State, task: Task, context: Context) -> State:
        """Nothing is learned."""
        return state

    def reopened(self, state: State, training: Collection[str]) -> State:
        """Nothing is known."""
        return state

    def shifted(self, state: State, versions: int) -> State:
        """No versions are known."""
        return state
