"""Stopping, sleeping and trying again: what every loop of a device needs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from anabranch.core.backoff import backed_off_s
from anabranch.core.errors import AnabranchError, outcome_of
from anabranch.core.rng import rank
from anabranch.support.stop_signals import at_safe_points, stop_signals

T = TypeVar("T")


class Interrupted(BaseException):
    """Somebody wants the loop to end. No `Exception`: a user's `except Exception` must not eat it."""


class Bell:
    """A sleep that another thread can end, and the wish to stop.

    `sleep(seconds)` replaces the real one, in tests with a clock of their own.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] | None = None
    ) -> None:
        self.now = clock
        self._rung = threading.Event()
        self._sleep = sleep or self._rung.wait
        self.stopped_by = ""  # what wants the loop to end
        self.patient = False

    def ring(self) -> None:
        """End the sleep of the moment, or else the next one."""
        self._rung.set()

    def stop(self) -> None:
        """From any thread: the next `check` or sleep raises `Interrupted`."""
        self.stopped_by = self.stopped_by or "stopped"
        self.ring()

    def check(self) -> None:
        """Raises `Interrupted` after `stop`, or after a signal, whatever became of what that has raised."""
        if self.stopped_by:
            raise Interrupted(self.stopped_by)

    def rest(self, seconds: float) -> None:
        """Sleep, or less if the bell rings. Raises `Interrupted` after `stop`."""
        self.check()
        if seconds > 0:
            self._sleep(seconds)
        self._rung.clear()
        self.check()


@contextmanager
def interruptible(bell: Bell) -> Iterator[None]:
    """Inside, `stop_signals` raise `Interrupted` in the main thread; a second one ends the process.

    While the bell is `patient`, they wait for its next `check`.
    Elsewhere than in the main thread, signals are left alone. A process that was forked inside, such as a
    DataLoader's worker, ends by them as it would without us.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's
        restore()
        if os.getpid() != owner:
            os.kill(os.getpid(), number)
            return
        bell.stopped_by = signal.Signals(number).name  # a user's bare `except` may eat what is raised
        if not bell.patient:
            raise Interrupted(bell.stopped_by)

    owner = os.getpid()
    previous = {number: signal.signal(number, at_safe_points(interrupt)) for number in stop_signals()}
    try:
        yield
    finally:
        restore()


def persist(
    call: Callable[[], T],
    bell: Bell,
    seed: int,
    base_s: float,
    cap_s: float,
    on_failure: Callable[[AnabranchError], object],
) -> T:
    """The call's result, repeated with full jitter while its errors may pass.

    For what happens outside a session, which backs off by the same rule.
    """
    failures = 0
    while True:
        try:
            return call()
        except AnabranchError as error:
            if not outcome_of(error).retryable:
                raise
            on_failure(error)
            failures += 1
            low, high = error.retry_after_s or (0.0, backed_off_s(base_s, cap_s, failures))
            bell.rest(low + (high - low) * rank(seed, "persist", failures))
