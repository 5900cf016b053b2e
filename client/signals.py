"""Ctrl-C while a command waits within gRPC."""

from __future__ import annotations

import _thread
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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
