"""The laws of core/engine/strategy.py, for any strategy."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from anabranch.core.engine.answers import checked_step, checked_task
from anabranch.core.engine.strategy import Context, State, Step, Strategy, may_publish
from anabranch.core.kept_state import lost
from anabranch.core.model.params import Delta, ParamSpec, SparseVector
from anabranch.core.model.submodels import Coordinates
from anabranch.core.model.updates import Ask, LocalPlan, Task, Update, Verdict
from anabranch.core.parts import PartKind
from anabranch.strategies.registry import STRATEGIES
from anabranch.testing.data import frozen, numbers_in, read_again
from anabranch.testing.elsewhere import came_to
from anabranch.testing.kind import check_of_kind

SIZE = 5
SPEC = ParamSpec.of({"w": np.zeros(SIZE, np.float32)})
LONG = 256  # updates of a run that goes on for long
BESIDE = "draw of core.rng alone, read no clock but context.now, and remember nothing but in the state"


def update(strategy: Strategy, number: int, staleness: int, scale: float = 1.0) -> Update:
    """One of the whole model, every third sparse, or, of every other where it takes sub-models, of a part.

    As on a server nobody can write to the values.
    """
    rng = np.random.default_rng(number)
    part = None
    if strategy.supports_submodels and number % 2:
        part = Coordinates(np.flatnonzero(rng.random(SIZE) < 0.5))
        part = part if part.size else Coordinates(np.array([number % SIZE]))
    delta = (scale * rng.standard_normal(SIZE if part is None else part.size)).astype(np.float32)
    delta.flags.writeable = False
    sent: Delta = delta
    if part is None and number % 3 == 2:
        sent = SparseVector(np.array([3, 0]), delta[:2], SIZE)
    ids = (f"u{number}", f"t{number}", f"c{number % 4}")
    return Update(*ids, 10 - staleness, 1 + number, sent, part)


def context(strategy: Strategy, vector: Any, staleness: int, now: float = 1.0) -> Context:
    clients = ("c0", "c1", "c2", "c3")
    base = vector.copy() if strategy.needs_base else None
    return Context(now, 10, 7, clients, live_tasks=0, staleness=staleness, base=base, spec=SPEC)


def start(strategy: Strategy) -> tuple[State, Any]:
    vector = np.arange(SIZE, dtype=np.float32)
    return strategy.init(vector), vector


def run(strategy: Strategy, count: int, *, restarts: bool = False, scale: float = 1.0) -> list[Step]:
    """`count` updates, each as fresh as its number is even; the steps, deeply copied.

    `restarts`: before each of them the server begins anew, with what a snapshot has, and with a strategy that
    remembers nothing.
    """
    made = copy.deepcopy(strategy)
    state, vector = start(strategy)
    steps = []
    for i in range(count):
        staleness = i % 2
        if restarts:
            strategy, state, vector = copy.deepcopy(made), read_again(strategy, state), vector.copy()
        sent, was = update(strategy, i, staleness, scale), vector.copy()
        step = strategy.step(state, vector, sent, context(strategy, vector, staleness))
        check_step(strategy, step, vector, was)
        state, vector = step.state, vector if step.vector is None else step.vector
        steps.append(copy.deepcopy(step))
    return steps


def check_step(strategy: Strategy, step: Step, vector: Any, was: Any) -> None:
    """It is one that a server takes. `vector` is what the step was given, and `was` what it was before."""
    checked_step(step, f"strategy {strategy.name!r}", SPEC)
    if step.vector is None:
        assert np.array_equal(vector, was), "it gives no vector and has changed the model: change a copy"
    else:
        assert np.isfinite(step.vector).all(), "a model that is not finite: reject what would make it so"


def steps_as_text(strategy: Strategy) -> list[tuple[str, str, str]]:
    """What twelve updates come to, for another process."""
    steps = run(strategy, 12)
    return [(frozen(strategy, s.state), repr(s.decision), repr(s.vector)) for s in steps]


def check_equal(strategy: Strategy, ones: list[Step], others: list[Step]) -> None:
    """To the bit."""
    for a, b in zip(ones, others, strict=True):
        assert frozen(strategy, a.state) == frozen(strategy, b.state), BESIDE
        assert a.decision == b.decision, BESIDE
        if a.vector is None or b.vector is None:
            assert a.vector is b.vector
        else:
            assert np.array_equal(a.vector, b.vector)


class StrategyConformance:
    """Write the fixture `strategy`: yours, of whatever parameters; with `params` of several."""

    kind: PartKind = STRATEGIES

    @pytest.fixture
    def strategy(self) -> Strategy:
        raise NotImplementedError("write the fixture `strategy`, which returns yours")

    def test_it_has_what_a_strategy_has(self, strategy: Strategy) -> None:
        check_of_kind(self.kind, type(strategy))

    def test_equal_calls_give_equal_results(self, strategy: Strategy) -> None:
        check_equal(strategy, run(strategy, 12), run(strategy, 12))

    def test_a_restart_changes_nothing(self, strategy: Strategy) -> None:
        """Whenever it comes: what is kept is neither in `self`, nor the model itself, nor another's array."""
        made = copy.deepcopy(strategy)
        check_equal(strategy, run(strategy, 12), run(made, 12, restarts=True))

    def test_another_process_comes_to_the_same(self, strategy: Strategy) -> None:
        """As a server does that is started again. There a set of texts has another order."""
        there = came_to(steps_as_text, strategy)
        assert steps_as_text(strategy) == there, f"hash() and sets of texts differ by process; {BESIDE}"

    def test_an_update_of_zeros_is_no_obstacle(self, strategy: Strategy) -> None:
        """A device may have learned nothing: its update has no length to be divided by."""
        run(strategy, 12, scale=0.0)

    def test_what_is_remembered_does_not_grow_with_the_updates(self, strategy: Strategy) -> None:
        """Those of four devices, a run long. Each snapshot has all of it."""
        steps = run(strategy, LONG)
        sizes = [numbers_in(s.state) if s.vector is not None else 0 for s in steps]
        early, late = max(sizes[: LONG // 2]), max(sizes[LONG // 2 :])
        if early:  # else it waits for more updates than these
            assert late <= 1.5 * early, f"the state holds {late} values after {LONG} updates, {early} by half"

    def test_a_version_is_published_exactly_with_a_vector(self, strategy: Strategy) -> None:
        for step in run(strategy, 12):
            assert step.decision is not None
            assert (step.decision.verdict is Verdict.PUBLISHED) == (step.vector is not None)
            if step.vector is not None:
                assert (step.vector.shape, step.vector.dtype.name) == ((SIZE,), "float32")

    def test_a_step_that_may_not_publish_leaves_the_model_alone(self, strategy: Strategy) -> None:
        """It gets the model itself, which others read meanwhile, and can write nothing there."""
        state, vector = start(strategy)
        for i in range(12):
            here = context(strategy, vector, i % 2)
            vector.flags.writeable = may_publish(strategy, state, here)
            step = strategy.step(state, vector, update(strategy, i, i % 2), here)
            if not vector.flags.writeable:
                assert step.vector is None, "`may_publish` said that it would not publish"
            state, vector = step.state, vector if step.vector is None else step.vector

    def test_a_rejection_leaves_state_and_vector_identical(self, strategy: Strategy) -> None:
        state, vector = start(strategy)
        for i in range(12):
            before, was = frozen(strategy, state), vector.copy()
            step = strategy.step(state, vector, update(strategy, i, i), context(strategy, vector, i))
            assert step.decision is not None
            if step.decision.verdict is Verdict.REJECTED:
                assert frozen(strategy, step.state) == before
                assert step.vector is None
                assert np.array_equal(vector, was)
                assert step.decision.reason
                assert step.decision.detail
            state, vector = step.state, vector if step.vector is None else step.vector

    def test_the_state_is_data(self, strategy: Strategy) -> None:
        """What a snapshot has of it is the same state: the types of its fields say what they have."""
        for step in run(strategy, 12):
            assert frozen(strategy, read_again(strategy, step.state)) == frozen(strategy, step.state)
            assert lost(step.state, strategy.state_type, np.empty(0)) == ""

    def test_admitting_changes_nothing_and_planning_keeps_the_local_settings(
        self, strategy: Strategy
    ) -> None:
        state, vector = start(strategy)
        before = frozen(strategy, state)
        ask, local = Ask("c0", "t0"), LocalPlan(epochs=3, batch_size=7, learning_rate=0.3)
        assert strategy.admit(state, ask, context(strategy, vector, 0)) is None
        assert frozen(strategy, state) == before
        plan = strategy.plan(state, ask, local, context(strategy, vector, 0))
        checked_task(plan, f"strategy {strategy.name!r}", strategy.state_type, local)
        kept = {f.name for f in fields(LocalPlan)} - {"proximal_mu"}
        assert all(getattr(plan.local, name) == getattr(local, name) for name in kept)

    def test_somebody_is_let_in_where_nobody_trains(self, strategy: Strategy) -> None:
        """Or sooner or later, where there is a timer: after twelve lost tasks, and after twelve updates."""
        state, vector = start(strategy)
        here = context(strategy, vector, 0)
        for i in range(12):
            ask = Ask(f"c{i % 4}", f"t{i}")
            if strategy.admit(state, ask, here) is None:
                plan = strategy.plan(state, ask, LocalPlan(), here)
                task = Task(ask.task_id, ask.client_id, 10, 1.0, 9.0, 8.0, 0, plan.local)
                state = strategy.on_lost(plan.state, task, here)
        for later in (state, run(strategy, 12)[-1].state):
            asked = [strategy.admit(later, Ask(c, "next"), here) for c in here.clients]
            assert None in asked or strategy.timer(later) is not None, "a fleet that is refused for ever"

    def test_a_timer_that_has_fired_is_over_or_later(self, strategy: Strategy) -> None:
        state, vector = start(strategy)
        local, here = LocalPlan(), context(strategy, vector, 0)
        state = strategy.plan(state, Ask("c0", "t0"), local, here).state
        state = strategy.step(state, vector, update(strategy, 0, 0), here).state
        due = strategy.timer(state)
        if due is not None:
            step = strategy.on_timer(state, vector, context(strategy, vector, 0, now=due))
            assert step is not None
            later = strategy.timer(step.state)
            assert later is None or later > due
