"""What listens on loopback while a test lasts, each connection in a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class Listener:
    """A context manager at `address`; who derives from it says what becomes of a connection, in `_serve`."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(600)
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._sockets.append(connection)
                self._start(self._serve, connection)

    def _start(self, run: object, *sockets: socket.socket) -> None:
        thread = threading.Thread(target=run, args=sockets)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _serve(self, connection: socket.socket) -> None:
        raise NotImplementedError
