"""An HTTP proxy on loopback that passes connections on to the one server that it knows, under any name."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

READ_BYTES = 16 * 1024


class ConnectProxy:
    """Answers CONNECT with `status`; with 200 bytes go on to this machine's port of the same number.

    `asked` has what was asked for: the first line and the headers, of each connection.
    """

    def __init__(self, status: str = "200 OK") -> None:
        self.status = status
        self.asked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> ConnectProxy:
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
                near, _ = self._listener.accept()
                self._sockets.append(near)
                self._start(self._serve, near)

    def _start(self, run: object, *sockets: socket.socket) -> None:
        thread = threading.Thread(target=run, args=sockets)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _serve(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                if not (byte := near.recv(1)):
                    return
                head += byte
            self.asked.append(head.decode())
            near.sendall(f"HTTP/1.1 {self.status}\r\nVia: a test\r\n\r\n".encode())
            if not self.status.startswith("200"):
                near.shutdown(socket.SHUT_RDWR)
                return
            port = int(head.split(b" ")[1].rpartition(b":")[2])
            far = socket.create_connection(("127.0.0.1", port))
            self._sockets.append(far)
            self._start(self._pump, near, far)
            self._start(self._pump, far, near)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
