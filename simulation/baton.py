"""A thread that runs only while somebody waits for it: it holds a baton, and hands it back.

So what such threads do comes in the order in which it is given, and a run of many of them repeats itself.
What one draws from the global generators of Python, numpy and torch is its own: they change with the baton.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

JOIN_S = 10.0  # of a thread that is told to end


class ThreadEnded(BaseException):
    """Leaves the thread's work. No `Exception`: an App's own `except` must not eat it."""


class Baton:
    """`work` is called in a thread of its own, with the call that hands the baton back until it comes again.

    `go_on` warns once where the baton does not come back within `silent_s`: `warn` has the words.
    """

    def __init__(
        self, work: Callable[[Callable[[], None]], None], warn: Callable[[], object], silent_s: float
    ) -> None:
        self._work, self._warn, self._silent_s = work, warn, silent_s
        self._given, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._over = self._done = False
        self._error: BaseException | None = None
        self._generators: Any = None
        self._thread = threading.Thread(target=self._run, name="anabranch-baton", daemon=True)

    def go_on(self) -> None:
        """Give the baton; returns when it is back. Raises what has ended the work."""
        if not self._done:
            with self._own_generators():
                self._give()
        if self._error is not None:
            raise self._error

    def _give(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._given.release()
        if not self._back.acquire(timeout=self._silent_s):
            self._warn()
            self._back.acquire()

    def end(self) -> None:
        """End the work where it waits for the baton. Work that does not heed that is left behind."""
        self._over = True
        if self._thread.is_alive():
            with self._own_generators():
                self._given.release()
                self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            self._wait()
            self._work(self._hand_back)
        except ThreadEnded:
            pass
        except BaseException as error:  # noqa: BLE001 - `go_on` raises it
            self._error = error
        finally:
            self._done = True
            self._back.release()

    def _hand_back(self) -> None:
        if not self._over:
            self._back.release()
            self._wait()
        if self._over:
            raise ThreadEnded

    def _wait(self) -> None:
        self._given.acquire()
        if self._over:
            raise ThreadEnded

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        before = _drawn()
        if self._generators is not None:
            _draw_from(self._generators)
        try:
            yield
        finally:
            self._generators = _drawn()
            _draw_from(before)


def _drawn() -> tuple[Any, Any, Any]:
    """Where the global generators are."""
    torch = sys.modules.get("torch")
    state = None if torch is None else torch.get_rng_state()
    return random.getstate(), np.random.get_state(), state


def _draw_from(states: tuple[Any, Any, Any]) -> None:
    torch = sys.modules.get("torch")
    random.setstate(states[0])
    np.random.set_state(states[1])
    if torch is not None and states[2] is not None:
        torch.set_rng_state(states[2])
