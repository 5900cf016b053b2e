"""An HTTP proxy on loopback that passes connections on to the one server that it knows, under any name."""

from __future__ import annotations

import contextlib
import socket

from listener import Listener

READ_BYTES = 16 * 1024


class ConnectProxy(Listener):
    """Answers CONNECT with `status`; with 200 bytes go on to this machine's port of the same number.

    `asked` has what was asked for: the first line and the headers, of each connection.
    """

    def __init__(self, status: str = "200 OK") -> None:
        self.status = status
        self.asked: list[str] = []
        super().__init__()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                if not (byte := connection.recv(1)):
                    return
                head += byte
            self.asked.append(head.decode())
            connection.sendall(f"HTTP/1.1 {self.status}\r\nVia: a test\r\n\r\n".encode())
            if not self.status.startswith("200"):
                connection.shutdown(socket.SHUT_RDWR)
                return
            port = int(head.split(b" ")[1].rpartition(b":")[2])
            far = socket.create_connection(("127.0.0.1", port))
            self._sockets.append(far)
            self._start(self._pump, connection, far)
            self._start(self._pump, far, connection)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
