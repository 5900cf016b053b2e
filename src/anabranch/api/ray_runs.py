"""Ray carries out whole runs: on this machine, or on the machines of a cluster, so many at a time.

A run is a task of Ray's. It writes its own folder, so that machines of a cluster need the folder on a disk
that all of them have, and anabranch and the App installed. Where a process or its machine dies, Ray gives the
run to another one, which goes on from what the folder has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from anabranch.core.config.ray import RayTable
from anabranch.core.errors import AppError, ConfigError
from anabranch.simulation.executors.ray import DEATHS_MAX, import_ray, start_ray

Work = TypeVar("Work")
Done = TypeVar("Done")


class RayRuns:
    """Hands work to Ray, `count` pieces at a time; each reserves what `table` says of an actor."""

    def __init__(self, ray: Any, count: int, table: RayTable) -> None:
        needs = {"num_cpus": table.cpus, "num_gpus": table.gpus}
        self._ray, self._threads = ray, ThreadPoolExecutor(count, "anabranch-ray")
        self._remote = ray.remote(**needs, max_retries=DEATHS_MAX)(_carried)
        self._under_way: set[Any] = set()

    def submit(self, carry: Callable[[Work], Done], work: Work, /) -> Future[Done]:
        """What comes of it, and what it raises."""
        return self._threads.submit(self._wait_for, carry, work)

    def close(self) -> None:
        """End what is under way, of which nobody wants to hear."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for reference in list(self._under_way):
            with suppress(Exception):  # it may have ended by itself
                self._ray.cancel(reference, force=True)
        self._threads.shutdown(wait=True)

    def _wait_for(self, carry: Callable[[Work], Done], work: Work) -> Done:
        reference = self._remote.remote(carry, work, os.getcwd())
        self._under_way.add(reference)
        try:
            done: Done = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.WorkerCrashedError as error:
            raise AppError(
                f"a run has ended the process that carries it out {DEATHS_MAX + 1} times: its code does so, "
                f"or the machine has too little memory for it ({error})"
            ) from error
        finally:
            self._under_way.discard(reference)
        return done


@contextmanager
def ray_runs(count: int, table: RayTable) -> Iterator[RayRuns]:
    """Raises `ConfigError` without Ray, or where it has not what one run needs."""
    ray = import_ray()
    started = not ray.is_initialized()
    if started:
        start_ray(ray, table)
    try:
        _check_room(ray, table)
        runs = RayRuns(ray, count, table)
        try:
            yield runs
        finally:
            runs.close()
    finally:
        if started:
            ray.shutdown()


def _carried(carry: Callable[[Work], Done], work: Work, folder: str) -> Done:
    """In a process of Ray's: the paths of the work begin at `folder`, where there is one."""
    if os.path.isdir(folder):
        os.chdir(folder)
    return carry(work)


def _check_room(ray: Any, table: RayTable) -> None:
    """A task that there is no room for would be waited for without end."""
    there = ray.cluster_resources()
    for name, needed in (("CPU", table.cpus), ("GPU", table.gpus)):
        if needed > there.get(name, 0.0) + 1e-9:
            raise ConfigError(
                f"a run needs {needed:g} {name}s, and Ray has {there.get(name, 0.0):g}: "
                f"lower ray.{name.lower()}s"
            )
