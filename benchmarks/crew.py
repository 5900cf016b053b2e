"""Processes of devices that set out together: each makes ready, and all of them wait for the slowest."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

MEET_S_MAX = 3600.0  # a device that hangs must not hold a night's measurements up


class Crew:
    """One process for each tuple of arguments, which calls `work(*arguments, barrier)`.

    Whoever reaches `barrier` waits for all others and for whoever measures, who waits by `meet`. If a process
    dies nobody waits on.
    """

    def __init__(self, work: Callable[..., None], each: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._barrier = context.Barrier(len(each) + 1, timeout=MEET_S_MAX)
        self._workers = [context.Process(target=work, args=(*its, self._barrier)) for its in each]
        for worker in self._workers:
            worker.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def meet(self) -> None:
        """Wait until all processes have come as far. Raises `RuntimeError` if one of them failed."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            self.end()
            raise RuntimeError(f"the devices did not meet within {MEET_S_MAX:.0f} s") from None

    def end(self) -> None:
        """Wait until all processes are over. Raises `RuntimeError` if one of them failed."""
        for worker in self._workers:
            worker.join()
        if codes := [worker.exitcode for worker in self._workers if worker.exitcode]:
            raise RuntimeError(f"a process of devices failed: exit codes {codes}, its error is above")

    def _watch(self) -> None:
        """Break the barrier as soon as one fails: the others would wait for it for ever."""
        running: dict[Any, Any] = {worker.sentinel: worker for worker in self._workers}
        while running:
            for sentinel in wait(list(running)):
                worker = running.pop(sentinel)
                worker.join()
                if worker.exitcode:
                    self._barrier.abort()
