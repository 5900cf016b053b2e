"""Executors whose work is done elsewhere: what is due first is begun first.

Only a few jobs are with the workers at a time; the rest wait here, where a cancelled one costs nothing: a
round's stragglers are due last.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Generic, TypeVar

from anabranch.simulation.executors.base import Evaluation, Job, LocalResult, Pending
from anabranch.simulation.executors.pool import lost_workers_told

T = TypeVar("T")
JOBS_PER_WORKER = 2  # one in training and one at the door, so that no worker waits for this process


class Queued(Generic[T]):
    """One piece of work: waiting here, then with a worker."""

    def __init__(self, queue: Queue, work: Job | Evaluation) -> None:
        self.work = work
        self.future: Future[T] | None = None
        self.cancelled = False
        self._queue = queue

    def result(self) -> T:
        """The result, waited for. Raises what the work raised."""
        self._queue.wait_for(self)
        assert self.future is not None, "work that was waited for has begun"
        with lost_workers_told():
            return self.future.result()

    def cancel(self) -> None:
        """The result will not be asked for."""
        self.cancelled = True
        if self.future is not None:
            self.future.cancel()


class Queue(ABC):
    """The work for `workers` equal workers; `_submit` hands a piece of it over."""

    def __init__(self, workers: int) -> None:
        self.begun_max = JOBS_PER_WORKER * workers
        self._begun: set[Future[Any]] = set()
        self._waiting: list[tuple[float, int, Queued[Any]]] = []
        self._count = 0

    @abstractmethod
    def _submit(self, work: Job | Evaluation) -> Future[Any]:
        """Begin a piece of work."""

    def train(self, job: Job) -> Pending[LocalResult]:
        """Training by whichever worker is free."""
        return self._enqueue(job)

    def evaluate(self, evaluation: Evaluation) -> Pending[Mapping[str, float]]:
        """An evaluation by whichever worker is free."""
        return self._enqueue(evaluation)

    def _enqueue(self, work: Job | Evaluation) -> Queued[Any]:
        self._count += 1
        queued: Queued[Any] = Queued(self, work)
        heapq.heappush(self._waiting, (work.due_s, self._count, queued))
        self._top_up()
        return queued

    def wait_for(self, queued: Queued[Any]) -> None:
        """Keep the workers supplied until this work is done."""
        self._top_up()
        while queued.future is None or not queued.future.done():
            wait(self._begun, return_when=FIRST_COMPLETED)
            self._top_up()

    def drop(self) -> None:
        """Nobody waits for what has not begun."""
        self._waiting.clear()

    def _top_up(self) -> None:
        self._begun = {f for f in self._begun if not f.done()}
        while self._waiting and len(self._begun) < self.begun_max:
            _, _, queued = heapq.heappop(self._waiting)
            if not queued.cancelled:
                with lost_workers_told():
                    queued.future = self._submit(queued.work)
                self._begun.add(queued.future)
