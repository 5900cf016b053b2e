"""Work whose result a checkpoint has is not done again; what is new goes into the checkpoint.

A piece of work has a number, in the order in which it is handed over, which follows from the virtual clock
alone. Who trains exactly never sees work that is on record. The batched executor sees it, as it trains others
beside it: `Job.known`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from anabranch.core.errors import InvalidUpdate
from anabranch.simulation.checkpoint import FORGOTTEN, Checkpoint
from anabranch.simulation.executors.base import Evaluation, Executor, Job, LocalResult, Pending

T = TypeVar("T")


class RecallingExecutor:
    """Has another executor do what `checkpoint` has no result of; `exact` is what that one's class says."""

    def __init__(self, inner: Executor, exact: bool, checkpoint: Checkpoint) -> None:
        self._inner, self._exact, self._checkpoint = inner, exact, checkpoint
        self._count = 0

    def train(self, job: Job) -> Pending[LocalResult]:
        """Training, unless its result is on record."""
        number, work = self._numbered(f"device {job.device}, task {job.task.task_id}")
        if not self._checkpoint.has(number, work):
            assert job.memory is not FORGOTTEN, "a device held it when the checkpoint was written"
            return NewWork(self._checkpoint, number, work, self._inner.train(job))
        known: Pending[LocalResult] = KnownWork(self._checkpoint, number)
        return known if self._exact else self._inner.train(replace(job, known=known))

    def evaluate(self, evaluation: Evaluation) -> Pending[Mapping[str, float]]:
        """A measurement, unless its result is on record."""
        number, work = self._numbered(f"a measurement at {evaluation.due_s!r} s")
        if self._checkpoint.has(number, work):
            return KnownWork(self._checkpoint, number)
        return NewWork(self._checkpoint, number, work, self._inner.evaluate(evaluation))

    def close(self) -> None:
        """See `Executor`."""
        self._inner.close()

    def _numbered(self, work: str) -> tuple[int, str]:
        self._count += 1
        return self._count, work


class KnownWork(Generic[T]):
    """Work whose result is on record."""

    def __init__(self, checkpoint: Checkpoint, number: int) -> None:
        self._checkpoint, self._number = checkpoint, number

    def result(self) -> T:
        """What came of it. Raises `InvalidUpdate` where that did."""
        outcome: Any = self._checkpoint.recall(self._number)
        if isinstance(outcome, InvalidUpdate):
            raise outcome
        found: T = outcome
        return found

    def cancel(self) -> None:
        """There is nothing to cancel."""


class NewWork(Generic[T]):
    """Work in another executor's hands; its result goes on record."""

    def __init__(self, checkpoint: Checkpoint, number: int, work: str, inner: Pending[T]) -> None:
        self._checkpoint, self._number, self._work, self._inner = checkpoint, number, work, inner

    def result(self) -> T:
        """See `Pending`."""
        try:
            found: Any = self._inner.result()
        except InvalidUpdate as error:
            self._checkpoint.keep(self._number, self._work, error)
            raise
        self._checkpoint.keep(self._number, self._work, found)
        taken: T = found
        return taken

    def cancel(self) -> None:
        """See `Pending`."""
        self._inner.cancel()
        self._checkpoint.keep(self._number, self._work, None)
