"""Ray carries out whole runs: on this machine, or on the machines of a cluster, so many at a time.

A run is a task of Ray's. It writes its own folder, so that machines of a cluster need the folder on a disk
that all of them have, and anabranch and the App installed. Where a process or its machine dies, Ray gives the
run to another one, which goes on from what the folder has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        self._closed = False

    def submit(self, carry: Callable[[Work], Done], work: Work, /) -> Future[Done]:
        """What comes of it, and what it raises."""
        return self._threads.submit(self._wait_for, carry, work)

    def close(self) -> None:
        """End what is under way, of which nobody wants to hear."""
        self._closed = True  # first: what a thread adds beside the list below it ends itself
        self._threads.shutdown(wait=False, cancel_futures=True)
        for reference in list(self._under_way):
            self._cancel(reference)
        self._threads.shutdown(wait=True)

    def _cancel(self, reference: Any) -> None:
        with suppress(Exception):  # it may have ended by itself
            self._ray.cancel(reference, force=True)

    def _wait_for(self, carry: Callable[[Work], Done], work: Work) -> Done:
        reference = self._remote.remote(carry, work, os.getcwd())
        self._under_way.add(reference)
        if self._closed:
            self._cancel(reference)
        try:
            done: Done = self._get(reference)
        except self._ray.exceptions.WorkerCrashedError as error:
            raise AppError(
                f"a run has ended the process that carries it out {DEATHS_MAX + 1} times: its code does so, "
                f"or the machine has too little memory for it ({error})"
            ) from error
        except self._ray.exceptions.RayError as error:  # its machine, its disk, its environment, ...
            raise AppError(f"Ray cannot carry a run out: {error or type(error).__name__}") from error
        finally:
            self._under_way.discard(reference)
        return done

    def _get(self, reference: Any) -> Any:
        """What the work comes to. Raises what it raises: of what cannot travel, Ray's own error."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None


@contextmanager
def ray_runs(count: int, table: RayTable, shared: bool) -> Iterator[RayRuns]:
    """`shared`: all machines may have the folder of the runs.

    Raises `ConfigError` without Ray, where no machine has what one run needs, or others lack the folder.
    """
    ray = import_ray("on = 'ray' (--on ray)")
    started = not ray.is_initialized()
    if started:
        start_ray(ray, table)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        _check_room([node["Resources"] for node in nodes], table)
        if not shared:
            _check_folder({node["NodeManagerAddress"] for node in nodes})
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


def _check_room(nodes: Sequence[Mapping[str, float]], table: RayTable) -> None:
    """A task that no machine alone has room for would be waited for without end."""
    needs = {"CPU": table.cpus, "GPU": table.gpus}

    def lacks(node: Mapping[str, float]) -> dict[str, float]:
        missing = {name: needed - node.get(name, 0.0) for name, needed in needs.items()}
        return {name: count for name, count in missing.items() if count > 1e-9}

    def told(there: Mapping[str, float]) -> str:
        return " and ".join(f"{there.get(name, 0.0):g} {name}s" for name, needed in needs.items() if needed)

    largest = min(nodes, key=lambda node: (len(lacks(node)), sum(lacks(node).values())))
    if lacking := lacks(largest):
        lower = " and ".join(f"ray.{name.lower()}s" for name in lacking)
        raise ConfigError(
            f"a run needs {told(needs)} on one machine, and the largest of Ray's has {told(largest)}: "
            f"lower {lower}"
        )


def _check_folder(addresses: set[str]) -> None:
    """What other machines write into a temporary folder of theirs would be lost."""
    if len(addresses) > 1:
        raise ConfigError(
            f"Ray has {len(addresses)} machines, and a temporary folder is on one of them alone: "
            "give out=..., a folder on a disk that all of them have"
        )
