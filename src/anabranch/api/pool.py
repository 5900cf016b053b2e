"""Where runs are simulated side by side: in processes, which end with who started them, or on Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

from anabranch.core.config.ray import RayTable
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError
from anabranch.host.build import said
from anabranch.simulation.executors.names import RAY
from anabranch.simulation.executors.pool import (
    DeafContext,
    lack_of_locks_told,
    lost_workers_told,
    prepare_worker,
)
from anabranch.support.said import Numbers

PROCESSES = "processes"
PLACES = (PROCESSES, RAY)  # `on` of sweeps and tunings

Work = TypeVar("Work")
Done = TypeVar("Done")
Given = ParamSpec("Given")


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
    """So many of them. Where something is raised inside, what is under way is broken off, and none begins."""
    # Not forked: neither torch's threads nor gRPC's survive that.
    method, context = multiprocessing.get_start_method(allow_none=True), DeafContext()
    with lack_of_locks_told("let one run come after the other: parallel = 1"):
        made = RunProcesses(count, context, _begin, (method, said.shared_by(context)))
    with lost_workers_told(), made as pool:
        try:
            yield pool
        except BaseException:
            pool.break_off()  # else the error of one is told when all the others have ended
            raise


class RunProcesses(ProcessPoolExecutor):
    """Processes that Ctrl-C interrupts in a run alone, and that begin none after it.

    While one starts it would tell of that in its own words. And a pool hands over more runs than there are
    processes, which it cannot take back.
    """

    def submit(self, fn: Callable[Given, Done], /, *args: Given.args, **kwargs: Given.kwargs) -> Future[Done]:
        """What comes of it, and what it raises."""
        return super().submit(partial(_carry, fn, *args, **kwargs))

    def break_off(self) -> None:
        """End what is under way, and begin nothing more.

        Its own processes have heard of a terminal's Ctrl-C, and of nothing else that ends the work. Those of
        another pool of this program go on.
        """
        workers = [*(self._processes or {}).values()]  # `shutdown` forgets them
        self.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            if worker.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGINT)


def check_place(on: str, key: str, config: Config) -> None:
    """Raises `ConfigError` where runs cannot be carried out there; `key` names the setting."""
    if on not in PLACES:
        raise ConfigError(f"{key} = {on!r}: give one of {', '.join(PLACES)}")
    if on == RAY and config.fleet.executor == RAY:
        raise ConfigError(
            f"{key} = 'ray' has Ray carry out whole runs, each of which would ask for more of it by "
            "fleet.executor = 'ray': leave one of the two out"
        )


class _Interrupt:
    """In a worker: whether Ctrl-C has come, and whether there is a run that it ends."""

    came = in_run = False

    def begin_run(self) -> None:
        """None begins after it."""
        self.in_run = True
        if self.came:
            raise KeyboardInterrupt

    def take(self, *_: object) -> None:
        """As the handler of SIGINT. One that is passed on does not break off how the first one ends."""
        self.came = True
        if self.in_run and not _is_ending():
            raise KeyboardInterrupt


def _is_ending() -> bool:
    """Whether an interruption is handled, or an error of what is done about it."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        error = error.__context__
    return error is not None


_interrupt = _Interrupt()


def _begin(start_method: str | None, numbers: Numbers) -> None:
    prepare_worker(start_method)
    said.share(numbers)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt.take)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one that came meanwhile comes now


def _carry(run: Callable[Given, Done], *args: Given.args, **kwargs: Given.kwargs) -> Done:
    try:
        _interrupt.begin_run()
        return run(*args, **kwargs)
    except KeyboardInterrupt:
        _interrupt.came = True  # a run has a handler of its own
        raise
    finally:
        _interrupt.in_run = False
