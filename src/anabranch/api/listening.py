"""A server of this process, in an event loop of its own: begun, asked for its addresses, and stopped."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from anabranch.api.background import Background
from anabranch.core.errors import ConfigError


class Listening(Background):
    """A base class: `_serve` is its own, and calls `_serving` once it listens; so is `_over_now`.

    `_served` is what the server has told of itself, its addresses among it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._ready = threading.Event()
        self._info: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    async def _serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, or until it is over."""
        raise NotImplementedError

    def _over_now(self) -> None:
        """It serves no more, whatever has ended it."""
        raise NotImplementedError

    @property
    def _served(self) -> Any:
        if self._info is None:
            raise ConfigError("the server is not running: enter its context, or call start()")
        return self._info

    @property
    def address(self) -> str:
        """Where devices reach it: `host:port`, and of several jobs one at `host:port/job`."""
        return str(self._served.address)

    @property
    def admin_address(self) -> str:
        """Where operators do."""
        return str(self._served.admin_address)

    @property
    def join_address(self) -> str:
        """Where devices join, whatever job they have; empty where nothing is guarded."""
        return str(self._served.join_address)

    def _serving(self, info: Any) -> None:
        self._info = info
        self._ready.set()

    def _work(self) -> None:
        try:
            asyncio.run(self._until_stopped())
        finally:
            self._ready.set()
            self._over_now()

    async def _until_stopped(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        await self._serve(self._stopping)

    def _began(self) -> None:
        self._ready.wait()
        self._raise()

    def _end(self) -> None:
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stopping.set)
