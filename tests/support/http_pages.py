"""What answers calls with a page, over HTTP/2: a proxy whose route is away, or a captive portal."""

from __future__ import annotations

import contextlib
import socket
import struct

from frames import END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame
from listener import Listener

ACK = 0x1
LITERAL_STATUS = 8  # HPACK: without indexing, by the name of entry 8 of the static table, `:status`


class HttpPages(Listener):
    """Answers each call with this HTTP status and nothing else; gRPC makes the rest of that."""

    def __init__(self, status: int) -> None:
        self._field = bytes([LITERAL_STATUS, 3]) + str(status).encode()
        super().__init__()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            _exactly(connection, len(PREFACE))
            connection.sendall(frame(SETTINGS, 0, 0, b""))
            while True:
                size_high, size_low, kind, flags, stream = struct.unpack(">BHBBI", _exactly(connection, 9))
                _exactly(connection, size_high << 16 | size_low)
                if kind == SETTINGS and not flags & ACK:
                    connection.sendall(frame(SETTINGS, ACK, 0, b""))
                elif kind == HEADERS:
                    connection.sendall(frame(HEADERS, END_STREAM | END_HEADERS, stream, self._field))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise EOFError
        data += more
    return data
