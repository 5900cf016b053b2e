"""What ends a process in good order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any


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


@contextmanager
def leaving_in_order() -> Iterator[None]:
    """Inside, the `stop_signals` raise: what was begun is tidied up. For the main thread.

    Ctrl-C does of itself; after the others the exit code is the one that a shell says of them.
    """

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    others = [number for number in stop_signals() if number != signal.SIGINT]
    before = {number: signal.signal(number, leave) for number in others}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
