"""Training in N worker processes, the work that is due first being begun first.

Only a few jobs are with the workers at a time; the rest wait here, where a cancelled one costs
nothing: a round's stragglers are due last. Workers are spawned, so a script that calls this must
guard its own start with `if __name__ == "__main__"`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any, Generic, TypeVar

from anabranch.core.errors import ConfigError
from anabranch.simulation.executors.base import Evaluation, Job, LocalResult, Pending
from anabranch.simulation.problem import OneThread, Problem, ProblemSource

T = TypeVar("T")
JOBS_PER_WORKER = 2  # one in training and one at the door, so that no worker waits for this process

_opened: list[Problem] = []  # in a worker process: its one problem


class _Queued(Generic[T]):
    """One piece of work: waiting here, then with a worker."""

    def __init__(self, pool: ProcessesExecutor, work: Callable[[Any], T], argument: Job | Evaluation) -> None:
        self._pool, self._work, self._argument = pool, work, argument
        self.future: Future[T] | None = None
        self.cancelled = False

    def begin(self, workers: ProcessPoolExecutor) -> Future[T]:
        self.future = workers.submit(self._work, self._argument)
        return self.future

    def result(self) -> T:
        self._pool.wait_for(self)
        assert self.future is not None, "work that was waited for has begun"
        return self.future.result()

    def cancel(self) -> None:
        self.cancelled = True
        if self.future is not None:
            self.future.cancel()


class ProcessesExecutor:
    """See the module. Raises `ConfigError` for less than one worker."""

    def __init__(self, source: ProblemSource, workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, not {workers}; 0 trains without processes")
        self._workers = ProcessPoolExecutor(workers, get_context("spawn"), _open, (source,))
        self._begun_max = JOBS_PER_WORKER * workers
        self._begun: set[Future[Any]] = set()
        self._waiting: list[tuple[float, int, _Queued[Any]]] = []
        self._count = 0

    def train(self, job: Job) -> Pending[LocalResult]:
        """Training by whichever worker is free."""
        return self._enqueue(_Queued(self, _train, job), job.due_s)

    def evaluate(self, evaluation: Evaluation) -> Pending[Mapping[str, float]]:
        """An evaluation by whichever worker is free."""
        return self._enqueue(_Queued(self, _evaluate, evaluation), evaluation.due_s)

    def close(self) -> None:
        """Drops what waits and ends the workers."""
        self._waiting.clear()
        self._workers.shutdown(wait=True, cancel_futures=True)

    def wait_for(self, work: _Queued[Any]) -> None:
        """Keep the workers supplied until this work is done."""
        self._top_up()
        while work.future is None or not work.future.done():
            wait(self._begun, return_when=FIRST_COMPLETED)
            self._top_up()

    def _enqueue(self, work: _Queued[T], due_s: float) -> _Queued[T]:
        self._count += 1
        heapq.heappush(self._waiting, (due_s, self._count, work))
        self._top_up()
        return work

    def _top_up(self) -> None:
        self._begun = {f for f in self._begun if not f.done()}
        while self._waiting and len(self._begun) < self._begun_max:
            _, _, work = heapq.heappop(self._waiting)
            if not work.cancelled:
                self._begun.add(work.begin(self._workers))


def _open(source: ProblemSource) -> None:
    _opened.append(source.open())
    OneThread()


def _train(job: Job) -> LocalResult:
    return _opened[0].train(job)


def _evaluate(evaluation: Evaluation) -> Mapping[str, float]:
    return _opened[0].evaluate(evaluation)
