"""Training in N worker processes of this machine.

Workers are spawned, so a script that calls this must guard its own start with `if __name__ == "__main__"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from anabranch.core.errors import ConfigError
from anabranch.simulation.executors.base import Evaluation, Job, LocalResult, without_model
from anabranch.simulation.executors.models import ModelFiles, model_at
from anabranch.simulation.executors.pool import WorkerState, worker_pool
from anabranch.simulation.executors.queued import Queue
from anabranch.simulation.problem import Problem, ProblemSource
from anabranch.support.allowance import cores

_opened: WorkerState[Problem] = WorkerState()


class ProcessesExecutor(Queue):
    """Trains in worker processes of this machine.

    Raises `ConfigError` for less than one worker.
    """

    exact: ClassVar[bool] = True

    def __init__(self, source: ProblemSource, workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, not {workers}; 0 trains without processes")
        super().__init__(workers)
        self._models = ModelFiles(self.begun_max)
        self._workers = worker_pool(workers, source, _open)

    @classmethod
    def of(cls, source: ProblemSource, problem: Problem, workers: int) -> ProcessesExecutor:
        """See `Executor`."""
        return cls(source, workers or cores())

    def close(self) -> None:
        """Drops what waits and ends the workers."""
        self.drop()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._models.close()

    def _submit(self, work: Job | Evaluation) -> Future[Any]:
        def begin(path: Path) -> Future[Any]:
            return self._workers.submit(_do, without_model(work), path)

        return self._models.lend(work.vector, begin)


def _open(source: ProblemSource) -> None:
    _opened.open(source.open)


def _do(work: Job | Evaluation, path: Path) -> LocalResult | Mapping[str, float]:
    return _opened.get().do(replace(work, vector=model_at(path)))
