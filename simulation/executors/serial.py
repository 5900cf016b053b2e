"""Training in this process, when the result is asked for: what is cancelled costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Generic, TypeVar

from anabranch.simulation.executors.base import Evaluation, Job, LocalResult, Pending
from anabranch.simulation.problem import OneThread, Problem, ProblemSource

T = TypeVar("T")


class Deferred(Generic[T]):
    """Work that is done when its result is asked for."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work

    def result(self) -> T:
        """Does it. Raises what the work raises."""
        return self._work()

    def cancel(self) -> None:
        """Nothing was begun."""


class SerialExecutor:
    """Trains in this process, when a result is asked for."""

    exact: ClassVar[bool] = True

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._threads = OneThread()

    @classmethod
    def of(cls, source: ProblemSource, problem: Problem, workers: int) -> SerialExecutor:
        """See `Executor`."""
        return cls(problem)

    def train(self, job: Job) -> Pending[LocalResult]:
        """Training put off until it is needed."""
        return Deferred(partial(self._problem.train, job))

    def evaluate(self, evaluation: Evaluation) -> Pending[Mapping[str, float]]:
        """An evaluation put off until it is needed."""
        return Deferred(partial(self._problem.evaluate, evaluation))

    def close(self) -> None:
        """Gives torch its threads back."""
        self._threads.restore()
