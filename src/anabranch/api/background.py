"""What runs in a thread of its own beside a program: started, awaited and stopped in one way.

with thing:             async with thing:
    thing.wait()            await thing.wait_async()
"""

from __future__ import annotations

import asyncio
import os
import threading
from types import TracebackType
from typing import Self

from anabranch.core.errors import ConfigError, Unavailable


class Background:
    """A context manager, sync and async, round a thread. A base class: `_work`, `_end`, `_began` are its own.

    What the work raises comes out of `wait`, or else at the end of the context.
    """

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._error: BaseException | None = None
        self._told = False
        self._process = os.getpid()

    def start(self) -> Self:
        """Begin; what a context manager does when it is entered. Returns once it is under way.

        Raises `ConfigError` where it has begun before.
        """
        if self._begun:
            raise ConfigError(f"{self._thread.name} has been started before, and once is all: make another")
        self._process = os.getpid()
        self._thread.start()
        self._began()
        return self

    def stop(self) -> None:
        """End soon, and wait for that. Raises what went wrong and was not told yet.

        Harmless to repeat, where it has not begun, and in a process that was forked meanwhile.
        """
        if not self._begun or not self._here:
            return
        self._end()
        self._thread.join()
        self._raise()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it has ended by itself. Raises what has ended it; `Unavailable` when the time is up.

        Raises `ConfigError` where it has not begun, and would never end, or as `check_here` does.
        """
        self._check_begun()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise Unavailable(f"{self._thread.name} has not ended within {timeout_s:g} s")
        self._raise()

    async def wait_async(self, timeout_s: float | None = None) -> None:
        """The same, while other tasks go on."""
        await asyncio.to_thread(self.wait, timeout_s)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._begun and not self._thread.is_alive()

    @property
    def ended_well(self) -> bool:
        """Whether it has ended, and nothing is to be told of that any more."""
        return self.over and (self._error is None or self._told)

    def leave(self) -> None:
        """End soon; not waited for."""
        if self._here:
            self._end()

    def check_here(self) -> None:
        """Raises `ConfigError` in a process that was forked meanwhile: the thread is in the other one."""
        if not self._here:
            raise ConfigError(
                f"{self._thread.name} goes on in process {self._process} alone: this one, {os.getpid()}, was "
                "forked from it. Fork before it begins, and begin one in each process, by an id of its own"
            )

    def _work(self) -> None:
        """In the thread, until it is over."""
        raise NotImplementedError

    def _end(self) -> None:
        """From another thread: `_work` shall return."""
        raise NotImplementedError

    def _began(self) -> None:
        """After the start: until it is under way."""

    @property
    def _begun(self) -> bool:
        return self._thread.ident is not None

    @property
    def _here(self) -> bool:
        return os.getpid() == self._process

    def _check_begun(self) -> None:
        if not self._begun:
            raise ConfigError(f"{self._thread.name} is not running: enter its context, or call start()")
        self.check_here()

    def _raise(self) -> None:
        if self._error is not None and not self._told:
            self._told = True
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - another thread raises it
            self._error = error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._told = True  # what is under way says more
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)
