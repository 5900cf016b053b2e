"""What answers calls with a page, over HTTP/2: a proxy whose route is away, or a captive portal."""

from __future__ import annotations

import contextlib
import socket
import struct

from listener import Listener

PREFACE = 24  # bytes that a client begins with
HEADERS, SETTINGS = 1, 4
ACK, END_STREAM, END_HEADERS = 1, 1, 4
LITERAL_STATUS = 8  # HPACK: without indexing, by the name of entry 8 of the static table, `:status`


class HttpPages(Listener):
    """Answers each call with this HTTP status and nothing else; gRPC makes the rest of that."""

    def __init__(self, status: int) -> None:
        self._field = bytes([LITERAL_STATUS, 3]) + str(status).encode()
        super().__init__()

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
