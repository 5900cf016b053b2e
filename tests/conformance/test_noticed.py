"""The kit of strategies notices what is wrong in ways that a simulation and its replay do not show."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from anabranch.core.engine.strategy import AsyncStrategy, Context, Plan, Refusal, State, Step, published
from anabranch.core.model.params import Vector, add_scaled
from anabranch.core.model.updates import Ask, LocalPlan, Reason, Update
from anabranch.testing import StrategyConformance


@dataclass(frozen=True)
class Remembered:
    number: int = 0
    model: Vector | None = None
    table: dict[str, int] = field(default_factory=dict)


class Plain(AsyncStrategy):
    """Half of each update is added; what is wrong comes in a subclass."""

    name: ClassVar[str] = "wrong"
    state_type: ClassVar[type[Any]] = Remembered

    def init(self, vector: Vector) -> State:
        return Remembered()

    def next(self, state: State, vector: Vector) -> State:
        return replace(state, number=state.number + 1)

    def step(self, state: State, vector: Vector, update: Update, context: Context) -> Step:
        add_scaled(vector, 0.5, update.delta)
        return Step(self.next(state, vector), vector, published(context.staleness, 0.5))


class KeepsTheModel(Plain):
    """Momentum by the model itself: none until a restart, some in the first step after one."""

    def next(self, state: State, vector: Vector) -> State:
        if state.model is not None:
            vector += np.float32(0.1) * (vector - state.model)
        return replace(state, model=vector)


class NumbersAsKeys(Plain):
    """From the fifth update on."""

    def next(self, state: State, vector: Vector) -> State:
        table = {state.number: 1} if state.number > 4 else {}
        return Remembered(state.number + 1, None, table)


class DenseAlone(Plain):
    def step(self, state: State, vector: Vector, update: Update, context: Context) -> Step:
        added: Any = update.delta
        return Step(state, vector + np.float32(0.5) * added, published(context.staleness, 0.5))


class WritesTheUpdate(Plain):
    def step(self, state: State, vector: Vector, update: Update, context: Context) -> Step:
        if isinstance(update.delta, np.ndarray):
            update.delta[:] *= 0.5
        return super().step(state, vector, update, context)


class Counting(Plain):
    """Four at a time; a task that is lost holds its place for ever."""

    def admit(self, state: State, ask: Ask, context: Context) -> Refusal | None:
        return Refusal(Reason.AT_CAPACITY, "four train") if state.number >= 4 else None

    def plan(self, state: State, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        return Plan(replace(state, number=state.number + 1), local)

    def next(self, state: State, vector: Vector) -> State:
        return replace(state, number=max(0, state.number - 1))


KIT = StrategyConformance()
EQUAL, RESTART = KIT.test_equal_calls_give_equal_results, KIT.test_a_restart_changes_nothing
LET_IN, DATA = KIT.test_somebody_is_let_in_where_nobody_trains, KIT.test_the_state_is_data


@pytest.mark.parametrize(
    ("strategy", "law", "noticed"),
    [
        (KeepsTheModel, RESTART, AssertionError),
        (NumbersAsKeys, DATA, AssertionError),
        (DenseAlone, EQUAL, TypeError),
        (WritesTheUpdate, EQUAL, ValueError),
        (Counting, LET_IN, AssertionError),
    ],
)
def test_a_wrong_strategy_is_noticed(strategy: type[Plain], law: Any, noticed: type[Exception]) -> None:
    with pytest.raises(noticed):
        law(strategy())
    for each in (EQUAL, RESTART, LET_IN, DATA):
        each(Plain())
