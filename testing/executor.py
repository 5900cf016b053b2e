"""What every executor of simulated training must do: simulation/executors/base.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import AppError
from anabranch.core.model.updates import LocalPlan, Task
from anabranch.core.parts import PartKind
from anabranch.simulation.executors.base import Evaluation, Executor, Job, LocalResult
from anabranch.simulation.executors.names import EXECUTORS
from anabranch.simulation.problem import OneThread, Problem, ProblemSource
from anabranch.testing.kind import check_of_kind
from anabranch.workloads.synthetic import Synthetic

Make = Callable[[], tuple[Problem, Executor]]


class Broken(Synthetic):
    """Fails in its training."""

    def train(self, model: Any, examples: Any, plan: LocalPlan, seed: int) -> dict[str, float]:
        """By design."""
        raise ZeroDivisionError("by design")


def settings(**tables: Any) -> Config:
    """A fleet of nine devices."""
    base = {"run": {"workload": "synthetic", "updates_max": 10}, "fleet": {"clients": 9}}
    return merge([("kit", base), ("yours", tables)])


def jobs_of(problem: Problem, plan: LocalPlan, count: int = 9, uplink: str = "raw", **task: Any) -> list[Job]:
    """Jobs of different devices, from different versions, due in another order than they begin."""
    start = problem.spec.flatten(problem.initial)
    found = []
    for i in range(count):
        vector = start * np.float32(1.0 + 0.05 * (i % 3))
        lease = Task(f"t{i}", f"c{i}", i % 3, 0.0, 60.0, 60.0, 100 + i, plan, uplink, **task)
        found.append(Job(i, vector, lease, None, float(-i)))
    return found


def delta_of(result: LocalResult) -> Any:
    """The values of a raw result."""
    return np.frombuffer(result.payload, np.float32)


class ExecutorConformance:
    """Say `executor`, your class, and `workers` if it is not to be 1."""

    kind: PartKind = EXECUTORS
    executor: type[Any]
    workers = 1

    @pytest.fixture
    def opened(self) -> Iterator[Callable[[Any], tuple[Problem, Executor]]]:
        made: list[Executor] = []
        threads = OneThread()

        def open_for(app: Any) -> tuple[Problem, Executor]:
            source = ProblemSource(settings(), app)
            problem = source.open()
            made.append(self.executor.of(source, problem, self.workers))
            return problem, made[-1]

        yield open_for
        for executor in made:
            executor.close()
        threads.restore()

    def test_it_has_what_an_executor_has(self) -> None:
        if self.executor.__module__.partition(".")[0] != "anabranch":
            check_of_kind(self.kind, self.executor)

    def test_it_comes_to_the_results_of_training_here(self, opened: Any) -> None:
        problem, executor = opened(None)
        jobs = jobs_of(problem, LocalPlan(steps=5, batch_size=16))
        serial = [problem.train(job) for job in jobs]
        pending = [executor.train(job) for job in jobs]
        for expected, work in zip(serial, pending, strict=True):
            result = work.result()
            assert (result.steps, result.codec) == (expected.steps, expected.codec)
            if self.executor.exact:
                assert result.payload == expected.payload
                assert result.metrics == expected.metrics
            else:
                np.testing.assert_allclose(delta_of(result), delta_of(expected), rtol=1e-3, atol=1e-6)

    def test_a_cancelled_job_disturbs_no_other(self, opened: Any) -> None:
        problem, executor = opened(None)
        jobs = jobs_of(problem, LocalPlan(steps=3, batch_size=16))
        pending = [executor.train(job) for job in jobs]
        for work in pending[::2]:
            work.cancel()
        for job, work in list(zip(jobs, pending, strict=True))[1::2]:
            expected = delta_of(problem.train(job))
            np.testing.assert_allclose(delta_of(work.result()), expected, rtol=1e-3, atol=1e-6)

    def test_an_evaluation_is_that_of_the_problem(self, opened: Any) -> None:
        problem, executor = opened(None)
        evaluation = Evaluation(problem.spec.flatten(problem.initial), 0.0)
        assert executor.evaluate(evaluation).result() == problem.evaluate(evaluation)

    def test_a_failure_in_training_comes_out_of_the_result(self, opened: Any) -> None:
        problem, executor = opened(Broken())
        (job,) = jobs_of(problem, LocalPlan(steps=3), count=1)
        with pytest.raises(AppError, match="ZeroDivisionError: by design"):
            executor.train(job).result()
