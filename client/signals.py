"""A signal's handler that raises, and the locks that it must not strike."""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable
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


def _in_lock(frame: FrameType | None) -> bool:
    """Whether a condition's lock is being taken or given back."""
    if frame is None or frame.f_globals is not vars(threading):
        return False
    if frame.f_code is WAIT:  # `gotit` is the last that it sets before it takes its lock again, whatever comes
        return "gotit" not in frame.f_locals
    return frame.f_code.co_name in LOCKING


def _send_again(number: int) -> None:
    time.sleep(AGAIN_S)
    os.kill(os.getpid(), number)
