"""One server's way to PostgreSQL, which can be shut: then nothing comes through, and nothing says so."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, urlsplit, urlunsplit

SOCKET = ".s.PGSQL.5432"
READ_BYTES = 64 * 1024


class PostgresGate:
    """A Unix socket in front of the database's own. `url` is the address through the gate."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        (host,) = parse_qs(parts.query)["host"]
        # Not under pytest's folder: a socket's path has 107 bytes at most.
        self._folder = Path(tempfile.mkdtemp(prefix="anabranch-gate-"))
        self.url = urlunsplit(parts._replace(query=f"host={self._folder}"))
        self._target = f"{host}/{SOCKET}"
        self._open = threading.Event()
        self._open.set()
        self._over = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / SOCKET))
        self._listener.listen()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> PostgresGate:
        self._begin(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._open.set()
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(600)
        shutil.rmtree(self._folder)

    def shut(self) -> None:
        """Let nothing more through, of old connections or new ones."""
        self._open.clear()

    def open(self) -> None:
        """Let all through again, what was held back first."""
        self._open.set()

    def _begin(self, work: object, *arguments: socket.socket) -> None:
        assert callable(work)
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._over:
            try:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                self._sockets += [near, far]
                far.connect(self._target)
            except OSError:
                return
            self._begin(self._pump, near, far)
            self._begin(self._pump, far, near)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES):
                self._open.wait()
                sink.sendall(data)
        self._open.wait()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
