"""The servers of a run, of which one leads: where the calls of a device go, and how it finds back.

Calls go to the server that served last. When one is not answered, a lookout begins: it asks all servers at
once, by the standard health check, whether they serve, and again after a short pause, until one does. Then
calls go there, over the connection that this was asked on, and whoever backs off for that reason is told.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from anabranch.client.health import asked_health, says_serving
from anabranch.identity.addresses import parse_addresses
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub

LOOK_S = 1.5  # a lost packet of a new connection goes again after a second
LOOK_S_MAX = 20.0
LOOK_SHARE = 1 / 20  # of the time that nobody has served: a long link takes longer
PAUSE_S = 0.25
PAUSE_MAX_S = 30.0
PAUSE_SHARE = 1 / 40  # of the time that nobody has served: after an hour there is no hurry
CLOSE_S = 2.0


@dataclass(frozen=True)
class Server:
    """One server, and the connection to it."""

    address: str
    channel: grpc.Channel
    stub: DevicesStub


class Servers:
    """The servers of a run, of which one leads: calls go to the one that served last.

    `connect` makes a channel to an address; nothing is connected before the first call.

    What it makes may change: see `reconnect`.
    `returned` is called, in a thread of the lookout, when a server serves after none did, or another one.
    """

    def __init__(self, addresses: str, connect: Callable[[str], grpc.Channel]) -> None:
        self.addresses = parse_addresses(addresses)
        self.returned: Callable[[], None] = lambda: None
        self._connect = connect
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._lookout: threading.Thread | None = None
        self._current = self._connected(self.addresses[0])
        self._former: grpc.Channel | None = None
        self._answered = False  # since the lookout began
        self._reconnects = 0

    @property
    def current(self) -> Server:
        """Where calls go."""
        return self._current

    def failed(self, server: Server) -> None:
        """A call to this server was not answered: look whether one serves, unless that is being done."""
        with self._lock:
            looking = self._lookout is not None and self._lookout.is_alive()
            if looking or self._over.is_set() or server is not self._current:
                return
            self._answered = False
            self._lookout = threading.Thread(target=self._look, name="anabranch-lookout", daemon=True)
            self._lookout.start()

    def answered(self, server: Server) -> None:
        """A call to this server was answered: nobody need look for another, nor cut what goes on over it."""
        if server is self._current:
            self._answered = True

    def reconnect(self) -> None:
        """Go on over a new connection to the same server, as `connect` makes another kind by now."""
        with self._lock:
            if self._over.is_set():
                return
            # Another thread may have a call under way: what it goes over is closed the next time.
            former, self._former = self._former, self._current.channel
            self._current = self._connected(self._current.address)
            self._reconnects += 1
        if former is not None:
            former.close()

    def close(self) -> None:
        """Cut off whatever is under way."""
        self._over.set()
        with self._lock:
            self._current.channel.close()
            if self._former is not None:
                self._former.close()
            lookout = self._lookout
        if lookout is not None and lookout is not threading.current_thread():
            lookout.join(CLOSE_S)

    def _look(self) -> None:
        began, nobody = time.monotonic(), False
        while not self._over.is_set():
            before, reconnects = self._current, self._reconnects
            look_s = min(LOOK_S_MAX, max(LOOK_S, LOOK_SHARE * (time.monotonic() - began)))
            found = self._find(before, nobody, look_s)
            if found is not None or self._answered:
                if found is not None and found is not before:
                    self._adopt(found, reconnects)
                if nobody or found is not before:
                    self.returned()
                return
            nobody = True
            longest = min(PAUSE_MAX_S, max(PAUSE_S, PAUSE_SHARE * (time.monotonic() - began)))
            self._over.wait(longest * random.uniform(0.5, 1.0))  # noqa: S311 - no secret

    def _find(self, current: Server, nobody: bool, look_s: float = LOOK_S) -> Server | None:
        """A server that serves; the current one as it is, if it has served all along."""
        # The current one first: a call to it may have been lost alone.
        in_turn = dict.fromkeys([current.address, *self.addresses])
        asked = {address: self._connect(address) for address in in_turn}
        calls = {address: asked_health(channel, look_s) for address, channel in asked.items()}
        found: Server | None = None
        for address, call in calls.items():
            if found is None and says_serving(call):
                if address == current.address and not nobody:
                    found = current
                else:
                    found = self._server(address, asked.pop(address))
        for channel in asked.values():
            channel.close()
        return found

    def _adopt(self, server: Server, reconnects: int) -> None:
        """Have calls go there, unless `close` was faster, or an answer; anew if `reconnect` was."""
        with self._lock:
            if self._answered:
                server.channel.close()
                return
            if self._reconnects > reconnects:
                server.channel.close()
                server = self._connected(server.address)
            before, self._current = self._current, server
            (server if self._over.is_set() else before).channel.close()

    def _connected(self, address: str) -> Server:
        return self._server(address, self._connect(address))

    def _server(self, address: str, channel: grpc.Channel) -> Server:
        return Server(address, channel, DevicesStub(channel))
