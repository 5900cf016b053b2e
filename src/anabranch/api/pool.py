"""Where runs are simulated side by side: in processes, which end with who started them, or on Ray."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Protocol, TypeVar

from anabranch.core.config.ray import RayTable
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError
from anabranch.simulation.executors.names import RAY
from anabranch.simulation.executors.pool import lost_workers_told
from anabranch.workloads.app import App

ORPHAN = 1  # the exit code of one whose parent was killed
PROCESSES = "processes"
PLACES = (PROCESSES, RAY)  # `on` of sweeps and tunings

Work = TypeVar("Work")
Done = TypeVar("Done")


class RunPool(Protocol):
    """Carries out runs, some at a time."""

    def submit(self, carry: Callable[[Work], Done], work: Work, /) -> Future[Done]:
        """What comes of it, and what it raises."""
        ...


@contextmanager
def run_pool(count: int, on: str, table: RayTable, shared: bool) -> Iterator[RunPool]:
    """So many runs at a time, in processes or as tasks of Ray's, each with what `table` reserves for it.

    `shared`: other machines may have the folder of the runs. Raises `ConfigError` without Ray, or where it
    has no room for a run, or machines that lack the folder.
    """
    if on == RAY:
        from anabranch.api.ray_runs import ray_runs  # imports Ray's executor

        with ray_runs(count, table, shared) as runs:
            yield runs
    else:
        with run_processes(count) as pool:
            yield pool


@contextmanager
def run_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """So many of them; what nobody has begun is given up where something is raised inside."""
    # Not forked: neither torch's threads nor gRPC's survive that.
    with lost_workers_told(), ProcessPoolExecutor(count, get_context("spawn"), _end_with_parent) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def check_place(on: str, key: str, config: Config) -> None:
    """Raises `ConfigError` where runs cannot be carried out there; `key` names the setting."""
    if on not in PLACES:
        raise ConfigError(f"{key} = {on!r}: give one of {', '.join(PLACES)}")
    if on == RAY and config.fleet.executor == RAY:
        raise ConfigError(
            f"{key} = 'ray' has Ray carry out whole runs, each of which would ask for more of it by "
            "fleet.executor = 'ray': leave one of the two out"
        )


def check_seen(apps: Iterable[App | None], call: str) -> None:
    """Raises `ConfigError` where other processes would not find the code of an App."""
    main = sys.modules["__main__"]
    if any(type(app).__module__ == "__main__" for app in apps) and not hasattr(main, "__file__"):
        raise ConfigError(
            f"{call}: other processes cannot see what a notebook defines: put the App in a file"
        )


def _end_with_parent() -> None:
    """A killed parent tells nobody: who waits for its next order would wait for ever, or hold a folder."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(ORPHAN)
