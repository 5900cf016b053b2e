"""An executor of one's own: it trains here and now, and counts what was asked of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

from anabranch.simulation.executors.base import Evaluation, Job, LocalResult, Pending
from anabranch.simulation.executors.serial import SerialExecutor
from anabranch.simulation.problem import Problem, ProblemSource


class Counting:
    name: ClassVar[str] = "counting"
    exact: ClassVar[bool] = True  # the same results as training one by one, to the bit

    def __init__(self, problem: Problem) -> None:
        self._serial = SerialExecutor(problem)
        self.asked: Counter[str] = Counter()

    @classmethod
    def of(cls, source: ProblemSource, problem: Problem, workers: int) -> Counting:
        return cls(problem)

    def train(self, job: Job) -> Pending[LocalResult]:
        self.asked["trainings"] += 1
        return self._serial.train(job)

    def evaluate(self, evaluation: Evaluation) -> Pending[Mapping[str, float]]:
        self.asked["evaluations"] += 1
        return self._serial.evaluate(evaluation)

    def close(self) -> None:
        self._serial.close()
