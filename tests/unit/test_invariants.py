"""Each law that is looked at after every event is broken by hand: what is said of it, and no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from machines import Bench, vector
from masked_bench import MaskedBench, masked_config

from anabranch.core.engine.engine import Engine
from anabranch.core.engine.invariants import violations
from anabranch.core.model.updates import Decision, Receipt, Task, TaskState, Verdict


def running() -> Engine:
    """Version 1, two live tasks of "a" that started from versions 0 and 1, an expired one of "b"."""
    bench = Bench("fedasync", concurrency=3, tasks_per_client=2, lease_s=10.0, lease_min_s=10.0)
    bench.enrol("a", "b", "c")
    bench.ask("b", "late", now=0.0)
    bench.ask("a", "old", now=5.0)
    bench.work("c", "done", now=5.0)
    bench.tick(10.0)
    bench.ask("a", "new", now=11.0)
    found = {task.task_id: (task.base_version, task.state) for task in bench.engine.ledger.tasks.values()}
    live, late = TaskState.LEASED, TaskState.EXPIRED
    assert found == {"late": (0, late), "old": (0, live), "new": (1, live)}
    assert violations(bench.engine) == []
    return bench.engine


def miscounted(e: Engine) -> None:
    e.ledger.live = 1


def over_the_cap(e: Engine) -> None:
    e.settings = replace(e.settings, concurrency=1)


def over_its_share(e: Engine) -> None:
    e.settings = replace(e.settings, tasks_per_client=1)


def of_the_future(e: Engine) -> None:
    started_from(e, 2)


def of_no_version(e: Engine) -> None:
    started_from(e, -1)


def started_from(e: Engine, version: int) -> None:
    task: Task = replace(e.ledger.tasks["late"], base_version=version)  # no live one: its model is not needed
    e.ledger.tasks["late"] = task


def of_nobody(e: Engine) -> None:
    del e.ledger.clients["b"]


def answered_twice(e: Engine) -> None:
    e.ledger.file(Receipt("u", "old", 1, Decision(Verdict.HELD)), answers_task=True)


def without_its_base(e: Engine) -> None:
    e.history.clear()


def with_an_old_base(e: Engine) -> None:
    e.history[7] = e.vector.copy()


def of_another_size(e: Engine) -> None:
    e.vector = vector(0, 0, 0)


def not_finite(e: Engine) -> None:
    e.vector[1] = np.inf


def of_no_update(e: Engine) -> None:
    e.counters.applied = 0


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (miscounted, ["2 live tasks, but 1 counted"]),
        (over_the_cap, ["2 live tasks over the cap of 1"]),
        (over_its_share, ["client a holds 2 live tasks"]),
        (of_the_future, ["task late starts from a future version"]),
        (of_no_version, ["task late starts from a future version"]),
        (of_nobody, ["task late is of an unknown client"]),
        (answered_twice, ["task old is open and answered"]),
        (without_its_base, ["the models of versions [0] are not held"]),
        (with_an_old_base, ["models are held that no live task started from"]),
        (of_another_size, ["the vector does not have the size of the spec"]),
        (not_finite, ["the model has values that are not finite"]),
        (of_no_update, ["more versions than updates"]),
    ],
)
def test_a_broken_law_is_named(breaks: Callable[[Engine], None], said: list[str]) -> None:
    engine = running()
    breaks(engine)
    assert violations(engine) == said


def test_what_is_no_breach() -> None:
    engine = running()
    engine.finished = "its budget"
    engine.history.clear()
    assert violations(engine) == [], "nobody needs a base any more"
    engine = running()
    engine.settings = replace(engine.settings, concurrency=2, tasks_per_client=2)
    assert violations(engine) == [], "as many as there may be"
    engine.settings = replace(engine.settings, concurrency=0, tasks_per_client=0)
    assert violations(engine) == [], "no bound"
    engine.counters.applied, engine.counters.rollbacks = 0, 1
    assert violations(engine) == [], "a version without an update"


def of_cohorts() -> MaskedBench:
    """One cohort that waits for its keeper, of "a" and "b", and one in the making, of "a"."""
    bench = MaskedBench(masked_config())
    bench.enrol("a", "b")
    for client, task in (("a", "a0"), ("b", "b0"), ("a", "a1")):
        bench.give(client, task, (1, 1, 1, 1))
    assert bench.engine.pending == ["update-of-a0", "update-of-b0", "update-of-a1"]
    assert violations(bench.engine) == []
    return bench


PENDING = ["what is pending is not what the cohorts have, each device once in one"]


def test_what_is_pending_is_what_the_cohorts_have_in_their_order() -> None:
    for order in ([0, 1], [1, 0, 2], [0, 1, 2, 2], [2, 0, 1]):
        engine = of_cohorts().engine
        engine.pending = [engine.pending[n] for n in order]
        assert violations(engine) == PENDING


def test_a_device_is_once_in_a_cohort_that_waits_and_in_the_one_in_the_making() -> None:
    bench = of_cohorts()
    (waiting,) = bench.cohorts.waiting
    twice = replace(waiting.members[1], client_id="a")
    bench.cohorts.waiting = (replace(waiting, members=(waiting.members[0], twice)),)
    assert violations(bench.engine) == PENDING
    bench = of_cohorts()
    bench.cohorts.members = (*bench.cohorts.members, replace(bench.cohorts.members[0], update_id="more"))
    bench.engine.pending.append("more")
    assert violations(bench.engine) == PENDING
