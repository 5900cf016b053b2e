"""A server of asyncio's in a thread of its own, which must end as it should."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Self

PATIENCE_S = 600.0  # of a busy machine


class ServerThread:
    """Started by `with`, drained at its end; who derives from it says in `_serve` what is served.

    `_serve` sets `_ready` once that begins, and ends when `_stop` is set. What else ends it fails the test:
    it is raised where the server is closed, unless the test asks for it by `failure`.
    """

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._error: Exception | None = None
        self.exit_code: int | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        began = self._ready.wait(PATIENCE_S)
        if not began or self._error is not None:
            self.close()
            raise AssertionError("the server does not begin")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> int | None:
        """Drain; returns the exit code, or raises what the server has ended with instead."""
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # its loop is closed, as it has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server does not end"
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.exit_code

    def failure(self) -> Exception:
        """What ends the server by itself, which is what the test is about."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server goes on"
        error, self._error = self._error, None
        assert error is not None, "it has ended as it should"
        return error

    async def _serve(self) -> int:
        raise NotImplementedError

    async def _run(self) -> int:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        return await self._serve()

    def _main(self) -> None:
        try:
            self.exit_code = asyncio.run(self._run())
        except Exception as error:  # noqa: BLE001 - it is raised again in the test's thread
            self._error = error
        self._ready.set()
