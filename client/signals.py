"""A signal's handler that raises, and where it must not: at locks, and where what is raised is lost."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from anabranch.support.stop_signals import mute_children

Handler = Callable[[int, FrameType | None], object]

# Of `threading.Condition`; and of the log, whose lock is held round a fork: a signal that came meanwhile
# strikes as it is given back. Python 3.13 has other names for that than those before it.
LOCKING = {
    threading: ("__enter__", "__exit__", "_acquire_restore", "_release_save"),
    logging: ("acquire", "release", "_acquireLock", "_releaseLock", "_prepareFork", "_afterFork"),
}
WAIT = threading.Condition.wait.__code__
AGAIN_S = 0.01


def at_safe_points(handler: Handler) -> Handler:
    """The handler, but for a signal that arrives where nothing may be raised: that comes again soon.

    What is raised while a lock is taken or given back leaves a lock that nobody gives back, and whoever wants
    it next, such as gRPC's threads, waits for ever; or a lock that is given back twice. What is raised in a
    `__del__`, in which a DataLoader waits for its workers, is printed by Python and lost.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        mute_children()
        if _in_lock(frame) or _in_finalizer(frame):
            _thread.start_new_thread(_send_again, (number,))  # `Thread` takes locks itself
        else:
            handler(number, frame)

    return handle


@contextmanager
def ended_by_interrupt(end: Callable[[], object]) -> Iterator[None]:
    """Inside, Ctrl-C calls `end`, in a thread of its own; `KeyboardInterrupt` is raised as the block is left.

    For what waits within gRPC and can be ended from without: whatever is raised there may leave a call half
    begun, of which gRPC's own thread then dies. A second Ctrl-C is as it was before.
    """
    struck: list[int] = []

    def strike(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's
        signal.signal(signal.SIGINT, before)
        struck.append(number)
        _thread.start_new_thread(end, ())

    before = signal.getsignal(signal.SIGINT)  # at hand before the first Ctrl-C can strike
    signal.signal(signal.SIGINT, strike)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if struck:
            raise KeyboardInterrupt


def _in_lock(frame: FrameType | None) -> bool:
    """Whether a lock of `LOCKING` is being taken or given back."""
    if frame is None:
        return False
    if frame.f_code is WAIT:  # with `gotit` it takes the lock again, whatever is raised
        return "gotit" not in frame.f_locals
    names = next((names for module, names in LOCKING.items() if frame.f_globals is vars(module)), ())
    return frame.f_code.co_name in names


def _in_finalizer(frame: FrameType | None) -> bool:
    """Whether a `__del__` is under way."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _send_again(number: int) -> None:
    time.sleep(AGAIN_S)
    os.kill(os.getpid(), number)
