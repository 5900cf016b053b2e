"""The laws of strategies/schedulers/scheduler.py, for any scheduler."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from anabranch.core.engine.strategy import Context, Plan, Refusal
from anabranch.core.model.chains import RAW
from anabranch.core.model.updates import Ask, LocalPlan, Task, Update
from anabranch.core.parts import PartKind
from anabranch.strategies.schedulers.registry import SCHEDULERS
from anabranch.strategies.schedulers.scheduler import Scheduler
from anabranch.testing.data import frozen, read_again
from anabranch.testing.elsewhere import came_to
from anabranch.testing.kind import check_of_kind

CLIENTS = tuple(f"c{i}" for i in range(6))
LOCAL = LocalPlan(steps=4, batch_size=7, learning_rate=0.3)


def context(now: float, version: int = 0, live: int = 0) -> Context:
    return Context(now, version, 7, CLIENTS, live_tasks=live)


def life(of: Scheduler, tasks: int = 40) -> tuple[Any, list[Plan]]:
    """A fleet in which device i takes (i + 1) / 10 s a step, and for its way; every fifth task is lost.

    The last state, and the plans. Each state that is given is compared with what it was.
    """
    state = of.init()
    plans: list[Plan] = []
    for n in range(tasks):
        client, now = CLIENTS[n % len(CLIENTS)], float(n)
        given, was = state, frozen(of, state)
        plan = of.plan(state, Ask(client, f"t{n}"), Plan(None, LOCAL), context(now, n // 4, n % 3))
        assert frozen(of, given) == was, "the state that was given has changed"
        state, plans = plan.state, [*plans, plan]
        steps, pace = plan.local.steps or 4, (1 + n % len(CLIENTS)) / 10
        if n % 5 == 4:
            task = Task(f"t{n}", client, 0, now, now + 9, 9.0, 0, plan.local)
            state = of.lost(state, task, context(now + 0.5, n // 4))
        else:
            update = Update(f"u{n}", f"t{n}", client, 0, 1, np.ones(2, np.float32), None, steps)
            update = replace(update, metrics={"train_s": steps * pace})
            state = of.arrived(state, update, context(now + (steps + 1) * pace, n // 4))
    return state, plans


def life_as_text(of: Scheduler) -> tuple[str, list[str]]:
    """The same, for another process."""
    state, plans = life(of)
    return frozen(of, state), [repr((plan.local, plan.uplink)) for plan in plans]


class SchedulerConformance:
    """Write the fixture `scheduler`: yours, of whatever parameters; with `params` of several."""

    kind: PartKind = SCHEDULERS

    @pytest.fixture
    def scheduler(self) -> Scheduler:
        raise NotImplementedError("write the fixture `scheduler`, which returns yours")

    def test_it_has_what_a_scheduler_has(self, scheduler: Scheduler) -> None:
        check_of_kind(self.kind, type(scheduler))

    def test_equal_calls_give_equal_results_and_the_state_is_data(self, scheduler: Scheduler) -> None:
        (state, plans), (again, same) = life(scheduler), life(copy.deepcopy(scheduler))
        assert frozen(scheduler, state) == frozen(scheduler, again)
        assert frozen(scheduler, read_again(scheduler, state)) == frozen(scheduler, state)
        assert [(p.local, p.uplink) for p in plans] == [(p.local, p.uplink) for p in same]

    def test_a_restart_changes_nothing(self, scheduler: Scheduler) -> None:
        state = life(scheduler)[0]
        plans = [
            scheduler.plan(known, Ask("c1", "next"), Plan(None, LOCAL), context(99.0, 11))
            for known in (state, read_again(scheduler, state))
        ]
        before, after = [(plan.local, plan.uplink, frozen(scheduler, plan.state)) for plan in plans]
        assert before == after

    def test_another_process_comes_to_the_same(self, scheduler: Scheduler) -> None:
        """As a server does that is started again. There a set of texts has another order."""
        assert life_as_text(scheduler) == came_to(life_as_text, scheduler)

    def test_admitting_changes_nothing_and_refuses_with_a_reason(self, scheduler: Scheduler) -> None:
        state = life(scheduler)[0]
        before = frozen(scheduler, state)
        for live in range(len(CLIENTS)):
            refusal = scheduler.admit(state, Ask("c0", "t99"), context(99.0, 11, live))
            assert refusal is None or (isinstance(refusal, Refusal) and refusal.reason and refusal.detail)
            for _ in range(8):
                assert scheduler.admit(state, Ask("c0", "t99"), context(99.0, 11, live)) == refusal
        assert frozen(scheduler, state) == before

    def test_somebody_trains_where_nobody_does(self, scheduler: Scheduler) -> None:
        for state in (scheduler.init(), life(scheduler)[0]):
            asked = [scheduler.admit(state, Ask(c, "t99"), context(99.0, 11)) for c in CLIENTS]
            assert None in asked, "a fleet that is all refused does nothing for ever"

    def test_nobody_waits_for_ever_for_who_has_left(self, scheduler: Scheduler) -> None:
        """All but one ask again and again, an hour long, and nobody is in training."""
        state, granted = life(scheduler)[0], 0
        for number in range(60):
            client, now = CLIENTS[1 + number % (len(CLIENTS) - 1)], context(100.0 + 60 * number, 11)
            ask = Ask(client, f"later{number}")
            if scheduler.admit(state, ask, now) is None:
                state, granted = scheduler.plan(state, ask, Plan(None, LOCAL), now).state, granted + 1
        assert granted > 30

    def test_plans_change_steps_and_chain_alone(self, scheduler: Scheduler) -> None:
        for plan in life(scheduler)[1]:
            assert plan.local.steps >= 0
            assert plan.uplink
            kept = {f.name for f in fields(LocalPlan)} - {"steps"}
            assert all(getattr(plan.local, name) == getattr(LOCAL, name) for name in kept)

    def test_what_was_lost_or_moved_is_no_error(self, scheduler: Scheduler) -> None:
        state = life(scheduler)[0]
        stray = Task("stranger", "c0", 0, 0.0, 9.0, 9.0, 0, LOCAL, RAW)
        state = scheduler.lost(state, stray, context(99.0, 11))
        state = scheduler.shifted(scheduler.reopened(state, ("c1",)), 5)
        assert frozen(scheduler, read_again(scheduler, state)) == frozen(scheduler, state)
        scheduler.plan(state, Ask("c1", "next"), Plan(None, LOCAL), context(100.0, 16))
