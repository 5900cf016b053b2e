"""The exchanges that are open: how many there may be, how long one waits for its device's next request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from anabranch.server.deadline import Deadline

T = TypeVar("T")

IDLE_S = 15.0  # devices that train longer open another
AGE_S = 25 * 60.0  # well before gRPC cuts the connection, in the midst of whatever there is


class OpenStream:
    """One exchange, between two requests or not."""

    def __init__(self) -> None:
        self._opened_at = asyncio.get_running_loop().time()
        self._ended = False
        self._deadline = Deadline()

    async def wait(self, read: Callable[[], Awaitable[T]]) -> T | None:
        """What `read` brings; None once the exchange is over."""
        now = asyncio.get_running_loop().time()
        if self._ended:
            return None
        try:
            with self._deadline.until(min(now + IDLE_S, self._opened_at + AGE_S)):
                return await read()
        except TimeoutError:
            return None

    def end(self) -> None:
        """Wait no longer. A request that is being answered comes to its end."""
        self._ended = True
        self._deadline.move(asyncio.get_running_loop().time())

    def close(self) -> None:
        """It is over."""
        self._deadline.close()


class Streams:
    """For the event loop's thread. At most `most` at a time: the other calls need their places, too."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[OpenStream] = set()
        self.closed = False

    @contextmanager
    def opened(self) -> Iterator[OpenStream | None]:
        """Inside there is one more; None where there are too many."""
        if self.closed or len(self._open) >= self._most:
            yield None
            return
        waiting = OpenStream()
        self._open.add(waiting)
        try:
            yield waiting
        finally:
            self._open.discard(waiting)
            waiting.close()

    def close(self) -> None:
        """End all of them, each as soon as its request is answered, and open no more."""
        self.closed = True
        self.end()

    def end(self) -> None:
        """End those that are open, each as soon as its request is answered."""
        for waiting in self._open:
            waiting.end()
