"""Worker processes: spawned, each with what it trains or with why it could not be made, and deaf to Ctrl-C.

Ctrl-C reaches every process of a terminal. The one that runs the simulation ends the others, so these leave
it alone: a signal that is blocked where a process is started stays blocked in it. They end with that one too
where it is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from types import FunctionType
from typing import Generic, TypeVar

from anabranch.core.errors import AnabranchError, AppError, ConfigError, disk_error
from anabranch.simulation.problem import OneThread, ProblemSource
from anabranch.support.heap import reuse_heap
from anabranch.workloads.app import App

GUARD = "a script that asks for processes does not keep its own lines under `if __name__ == '__main__':`"

T = TypeVar("T")


class DeafProcess(SpawnProcess):
    """A process that is never told of Ctrl-C."""

    def start(self) -> None:
        """As any process."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class DeafContext(SpawnContext):
    """Starts such processes, whenever a pool wants one."""

    Process = DeafProcess


class WorkerState(Generic[T]):
    """In a worker process: what its work is done with."""

    def __init__(self) -> None:
        self._found: T | None = None
        self._error: AnabranchError | None = None

    def open(self, make: Callable[[], T]) -> None:
        """Make it. An error waits for the first work, which is asked for its result."""
        try:
            self._found = make()
        except AnabranchError as error:
            self._error = error
        OneThread()

    def get(self) -> T:
        """What was made. Raises what its making raised."""
        if self._error is not None:
            raise self._error
        assert self._found is not None, "opened before all work"
        return self._found


def worker_pool(
    workers: int, source: ProblemSource, open_source: Callable[[ProblemSource], None]
) -> ProcessPoolExecutor:
    """Processes, each of which calls `open_source`.

    Raises `AppError` or `ConfigError` if the App cannot travel, and `StoreError`. They are spawned, so a
    script that calls this must guard its own start. The first one is started here, the others with the first
    work that finds no idle one.
    """
    check_seen([source.app], f"simulate(workers={workers})")
    begun = (open_source, source, multiprocessing.get_start_method(allow_none=True))
    with lack_of_locks_told("train with --workers 0"):
        pool = ProcessPoolExecutor(workers, DeafContext(), _begin, begun)
    try:
        pool.submit(_nothing)
    except Exception as error:
        pool.shutdown(wait=False, cancel_futures=True)
        raise AppError(
            f"the App cannot be sent to worker processes ({error}): define its class at the top of a module, "
            "and keep in it only what can be pickled; or train with --workers 0"
        ) from error
    return pool


@contextmanager
def lack_of_locks_told(otherwise: str) -> Iterator[None]:
    """Raises `StoreError` with the fix where no pool can be made: its locks are files in memory."""
    try:
        _begin_tracker()
        yield
    except OSError as error:
        hint = f", where worker processes have their locks: let it be written to, or {otherwise}"
        raise disk_error("/dev/shm", error, hint) from error  # noqa: S108 - named, not used


def _begin_tracker() -> None:
    """Python's own process beside those of a pool, which is not to hear that a terminal was closed.

    It lets go of the locks of who dies. Where it dies itself another one tells, by tracebacks, what it lacks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_seen(apps: Iterable[App | None], call: str) -> None:
    """Raises `ConfigError` where other processes would not find the code of an App."""
    main = sys.modules["__main__"]
    if any(map(_is_of_main, apps)) and not hasattr(main, "__file__"):
        raise ConfigError(
            f"{call}: other processes cannot see what a notebook defines: put the App in a file"
        )


def _is_of_main(app: App | None) -> bool:
    """Whether its class is of the script itself, or what it was made of: a model's function, say."""
    parts = (app, *getattr(app, "__dict__", {}).values())
    kinds = (part if isinstance(part, type | FunctionType) else type(part) for part in parts)
    return any(kind.__module__ == "__main__" for kind in kinds)


def check_no_worker_begins() -> None:
    """Ends a process that was begun to work for a script, and that carries out the script again instead.

    A process that is begun imports the script of the one that began it, whose own lines are then carried out
    unless they are guarded.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(f"error: {GUARD}; this worker ends")


@contextmanager
def lost_workers_told() -> Iterator[None]:
    """Raises `AppError` with the fix where a worker process has ended that nobody told to."""
    try:
        yield
    except BrokenProcessPool as error:
        raise AppError(
            f"a worker process has ended before it was done: memory ran out, or {GUARD}"
        ) from error


def _begin(
    open_source: Callable[[ProblemSource], None], source: ProblemSource, start_method: str | None
) -> None:
    prepare_worker(start_method)
    reuse_heap()
    open_source(source)


def prepare_worker(start_method: str | None) -> None:
    """What comes first in a worker process. `start_method`: the script's own.

    For what an App starts, which would all be spawned as this was. And it ends with the process that began
    it: killed, that one tells nobody, and it would wait for work, or hold a folder, for ever.
    """
    multiprocessing.set_start_method(start_method, force=True)
    threading.Thread(target=_end_with_parent, name="anabranch-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker was spawned"
    parent.join()
    os._exit(1)


def _nothing() -> None:
    pass
