"""A signal's handler that raises, and the locks that it must not strike."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

LOCKING = ("__enter__", "__exit__", "_acquire_restore", "_release_save")  # of `threading.Condition`
WAIT = threading.Condition.wait.__code__
AGAIN_S = 0.01


def between_locks(handler: Handler) -> Handler:
    """The handler, but for a signal that arrives while a lock is taken or given back: that comes again soon.

    What is raised there leaves a lock that nobody gives back, and whoever wants it next, such as gRPC's
    threads, waits for ever; or a lock that is given back twice.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if _in_lock(frame):
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

    before = signal.signal(signal.SIGINT, strike)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if struck:
            raise KeyboardInterrupt


def _in_lock(frame: FrameType | None) -> bool:
    """Whether a condition's lock is being taken or given back."""
    if frame is None or frame.f_globals is not vars(threading):
        return False
    if frame.f_code is WAIT:  # with `gotit` it takes the lock again, whatever is raised
        return "gotit" not in frame.f_locals
    return frame.f_code.co_name in LOCKING


def _send_again(number: int) -> None:
    time.sleep(AGAIN_S)
    os.kill(os.getpid(), number)
