"""What ends a process in good order: signals, and handlers that raise, but where nothing may be raised."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], object]

# Of `threading.Condition`; and of the log, whose lock is held round a fork: a signal that came meanwhile
# strikes as it is given back. Python 3.13 has other names for that than those before it.
LOCKING = {
    threading: ("__enter__", "__exit__", "_acquire_restore", "_release_save"),
    logging: ("acquire", "release", "_acquireLock", "_releaseLock", "_prepareFork", "_afterFork"),
}
WAIT = threading.Condition.wait.__code__
AGAIN_S = 0.01


class Terminated(SystemExit):
    """SIGTERM or SIGHUP came. A class of its own: an App that calls `sys.exit` is something else."""


def stop_signals() -> list[signal.Signals]:
    """Ctrl-C, SIGTERM, and the end of its terminal, which `nohup` keeps from it."""
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *(() if under_nohup else (signal.SIGHUP,))]


def call_on_signals(then: Callable[[], object], *numbers: signal.Signals) -> None:
    """Have the loop that runs call it at these signals, and do nothing that they did before.

    Where this is not the main thread nothing is done: whoever started the thread stops what runs in it.
    """
    import asyncio  # a device has no loop

    loop = asyncio.get_running_loop()
    with suppress(RuntimeError, ValueError, NotImplementedError):
        for number in numbers:
            loop.add_signal_handler(number, then)


def mute_children() -> None:
    """For who has been told to stop: from here on what a handler of SIGCHLD raises is lost.

    The signal may have gone to the whole group, and torch tells of a DataLoader's workers that end by it with
    a `RuntimeError`, wherever the main thread is, in the place of what would end the process in order.
    """
    heard = signal.getsignal(signal.SIGCHLD)
    if callable(heard) and not _is_muted(heard):
        signal.signal(signal.SIGCHLD, partial(_muted, heard))


def _is_muted(handler: Any) -> bool:
    return isinstance(handler, partial) and handler.func is _muted


def _muted(handler: Any, number: int, frame: FrameType | None) -> None:
    with suppress(Exception):
        handler(number, frame)


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
def leaving_in_order() -> Iterator[None]:
    """Inside, the `stop_signals` raise: what was begun is tidied up. For the main thread.

    Ctrl-C does of itself; after the others the exit code is the one that a shell says of them.
    """

    def leave(number: int, _: object) -> None:
        raise Terminated(128 + number)

    others = [number for number in stop_signals() if number != signal.SIGINT]
    before = {number: signal.signal(number, at_safe_points(leave)) for number in others}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
