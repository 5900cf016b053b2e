"""A TCP proxy on loopback that cuts connections, or lets nothing more through, after so many bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType

READ_BYTES = 16 * 1024
BUFFER_BYTES = 128 * 1024  # small: what lies in them is lost with the connection


class FlakyProxy:
    """`cuts[i]` bounds the bytes of the i-th connection, both ways together; later ones have no bound.

    With `silent`, a connection at its bound stays open and nothing more comes through. While nobody
    listens at the target, connections end as they come.
    """

    def __init__(self, target: str, cuts: Sequence[int], silent: bool = False) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._cuts, self._silent = deque(cuts), silent
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._lock = threading.Lock()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed_bytes = 0
        self.connections = 0
        self._healed = threading.Event()
        self._healed.set()

    def __enter__(self) -> FlakyProxy:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _shut(self._listener)
        self._threads[0].join(600)  # it may just have accepted one more
        self.cut()
        for thread in self._threads[1:]:
            thread.join(600)

    def cut(self, next_ones: Iterable[int] = ()) -> None:
        """Cut every connection that is open, and bound the bytes of the next ones."""
        with self._lock:
            open_now, self._sockets = self._sockets[1:], self._sockets[:1]
            self._cuts.extend(next_ones)
        for one in open_now:
            _shut(one)

    def part(self) -> None:
        """Cut every connection, and end new ones as they come, until `heal`."""
        self._healed.clear()
        self.cut()

    def heal(self) -> None:
        """Let connections through again."""
        self._healed.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._healed.is_set():
                _shut(near)
                continue
            try:
                far = socket.create_connection(self._target)
            except OSError:
                _shut(near)
                continue
            for one in (near, far):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            self.connections += 1
            with self._lock:
                budget = [self._cuts.popleft() if self._cuts else None]
                self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pump, args=(source, sink, budget))
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, budget: list[int | None]) -> None:
        try:
            while data := source.recv(READ_BYTES):
                with self._lock:
                    self.passed_bytes += len(data)
                    left = budget[0]
                    if left is not None:
                        budget[0] = left - len(data)
                if left is not None and left < len(data):
                    if self._silent:
                        continue
                    break
                sink.sendall(data)
        except OSError:
            pass
        if not self._silent:
            _shut(source)
            _shut(sink)


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
