"""Training in this process, many devices in one vectorised pass: `workloads/batched.py`.

A job waits until a result is needed. Then those that are due next, and are of the same kind, are trained
with it. The set follows from the virtual clock alone, so a run repeats itself to the bit; it differs from a
serial run by rounding, though, and has a digest of its own. Models that cannot be stacked are trained one by
one, and the log says why, once.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from anabranch.core.errors import ConfigError, InvalidUpdate
from anabranch.simulation.executors.base import Evaluation, Job, LocalResult, Pending
from anabranch.simulation.executors.serial import Deferred
from anabranch.simulation.problem import OneThread, Problem
from anabranch.workloads.batched import BatchedTraining
from anabranch.workloads.torch_trainer import TorchTrainer
from anabranch.workloads.trainer import Training

log = logging.getLogger(__name__)

WEIGHTS_BYTES_MAX = 256 << 20  # of a stack; gradients and momentum are as much each
Kind = tuple[Any, ...]


class _Waiting:
    """One job, not begun; then its result, or what its training raised."""

    def __init__(self, executor: BatchedExecutor, job: Job, trainings: Sequence[Training]) -> None:
        self.job, self.trainings = job, trainings
        self.outcome: LocalResult | InvalidUpdate | None = None
        self._executor = executor

    def result(self) -> LocalResult:
        if self.outcome is None:
            self._executor.train_with(self)
        if isinstance(self.outcome, InvalidUpdate):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome

    def cancel(self) -> None:
        self._executor.forget(self)


class BatchedExecutor:
    """See the module. `devices_max`: trainings in a stack. Raises `ConfigError` without a torch model."""

    def __init__(self, problem: Problem, devices_max: int) -> None:
        if not isinstance(problem.trainer, TorchTrainer):
            raise ConfigError(
                f"fleet.executor = 'batched' needs a torch model, and {problem.app.name} has numpy arrays: "
                "write serial or processes"
            )
        self._problem, self._devices_max = problem, devices_max
        self._training = BatchedTraining(problem.trainer)
        self._waiting: dict[Kind, dict[int, _Waiting]] = {}
        self._said: set[str] = set()
        self._threads = OneThread()

    def train(self, job: Job) -> Pending[LocalResult]:
        """Training put off until the result is needed, or that of a job that is trained with it."""
        trainings = self._problem.trainings(job)
        if not self._fits(trainings[0]):
            return Deferred(partial(self._problem.train, job))
        work = _Waiting(self, job, trainings)
        self._waiting.setdefault(trainings[0].kind, {})[id(work)] = work
        return work

    def evaluate(self, evaluation: Evaluation) -> Pending[Mapping[str, float]]:
        """An evaluation put off until it is needed."""
        return Deferred(partial(self._problem.evaluate, evaluation))

    def close(self) -> None:
        """Drops what waits; gives torch its threads back."""
        self._waiting.clear()
        self._threads.restore()

    def forget(self, work: _Waiting) -> None:
        """The result will not be asked for."""
        self._waiting.get(work.trainings[0].kind, {}).pop(id(work), None)

    def train_with(self, needed: _Waiting) -> None:
        """Train a job, and as many of its kind as a stack takes, those that are due first."""
        waiting = self._waiting[needed.trainings[0].kind]
        del waiting[id(needed)]
        size_bytes = needed.trainings[0].vector.nbytes
        most = max(1, min(self._devices_max, WEIGHTS_BYTES_MAX // max(1, size_bytes)))
        works = [needed, *heapq.nsmallest(most - 1, waiting.values(), key=lambda w: w.job.due_s)]
        for work in works[1:]:
            del waiting[id(work)]
        results = iter(self._training.train([t for w in works for t in w.trainings], self._problem.frozen))
        for work in works:
            try:
                work.outcome = self._problem.finish(work.job, [next(results) for _ in work.trainings])
            except InvalidUpdate as error:
                work.outcome = error

    def _fits(self, training: Training) -> bool:
        why = self._training.objection(training, self._problem.frozen)
        if why and why not in self._said:
            self._said.add(why)
            log.warning("devices are trained one by one: %s", why)
        return not why
