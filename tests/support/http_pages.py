"""What answers calls with a page, over HTTP/2: a proxy whose route is away, or a captive portal."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType

PREFACE = 24  # bytes that a client begins with
HEADERS, SETTINGS = 1, 4
ACK, END_STREAM, END_HEADERS = 1, 1, 4
LITERAL_STATUS = 8  # HPACK: without indexing, by the name of entry 8 of the static table, `:status`


class HttpPages:
    """Answers each call with this HTTP status and nothing else; gRPC makes the rest of that."""

    def __init__(self, status: int) -> None:
        self._field = bytes([LITERAL_STATUS, 3]) + str(status).encode()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> HttpPages:
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
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            _exactly(connection, PREFACE)
            connection.sendall(_frame(SETTINGS, 0, 0, b""))
            while True:
                size_high, size_low, kind, flags, stream = struct.unpack(">BHBBI", _exactly(connection, 9))
                _exactly(connection, size_high << 16 | size_low)
                if kind == SETTINGS and not flags & ACK:
                    connection.sendall(_frame(SETTINGS, ACK, 0, b""))
                elif kind == HEADERS:
                    connection.sendall(_frame(HEADERS, END_STREAM | END_HEADERS, stream, self._field))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise EOFError
        data += more
    return data


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">BHBBI", 0, len(payload), kind, flags, stream) + payload
