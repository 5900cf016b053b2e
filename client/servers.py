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

from anabranch.client.channel import asked_health, says_serving
from anabranch.core.errors import ConfigError
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub

LOOK_S = 1.5  # a lost packet of a new connection goes again after a second
PAUSE_S = 0.25
PAUSE_MAX_S = 30.0
PAUSE_SHARE = (
    1 / 40
)  # of the time that nobody has served: a device that was cut off for an hour need not hurry
CLOSE_S = 2.0


@dataclass(frozen=True)
class Server:
    """One server, and the connection to it."""

    address: str
    channel: grpc.Channel
    stub: DevicesStub


def parse_addresses(text: str) -> list[str]:
    """`host:port`, or several with commas between them. Raises `ConfigError`."""
    addresses = [part.strip() for part in text.split(",")]
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isdigit()):
            raise ConfigError(f"server {text!r}: write HOST:PORT, or HOST:PORT,HOST:PORT for several servers")
    return addresses


class Servers:
    """See the module. `connect` makes a channel to an address; nothing is connected before the first call.

    `returned` is called, in a thread of the lookout, when a server serves after none did, or another one.
    """

    def __init__(self, addresses: str, connect: Callable[[str], grpc.Channel]) -> None:
        self.addresses = parse_addresses(addresses)
        self.returned: Callable[[], None] = lambda: None
        self._connect = connect
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._lookout: threading.Thread | None = None
        self._current = self._server(self.addresses[0], connect(self.addresses[0]))

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
            self._lookout = threading.Thread(target=self._look, name="anabranch-lookout", daemon=True)
            self._lookout.start()

    def close(self) -> None:
        """Cut off whatever is under way."""
        self._over.set()
        with self._lock:
            self._current.channel.close()
            lookout = self._lookout
        if lookout is not None and lookout is not threading.current_thread():
            lookout.join(CLOSE_S)

    def _look(self) -> None:
        began, nobody = time.monotonic(), False
        while not self._over.is_set():
            if (found := self._find(nobody)) is not None:
                if found is not self._current:
                    self._adopt(found)
                    self.returned()
                return
            nobody = True
            longest = min(PAUSE_MAX_S, max(PAUSE_S, PAUSE_SHARE * (time.monotonic() - began)))
            self._over.wait(longest * random.uniform(0.5, 1.0))  # noqa: S311 - no secret

    def _find(self, nobody: bool) -> Server | None:
        """A server that serves; the current one as it is, if it has served all along."""
        asked = {address: self._connect(address) for address in self._in_turn()}
        calls = {address: asked_health(channel, LOOK_S) for address, channel in asked.items()}
        found: Server | None = None
        for address, call in calls.items():
            if found is None and says_serving(call):
                if address == self._current.address and not nobody:
                    found = self._current
                else:
                    found = self._server(address, asked.pop(address))
        for channel in asked.values():
            channel.close()
        return found

    def _in_turn(self) -> list[str]:
        """The current one first: a call to it may have been lost alone."""
        current = self._current.address
        return [current, *(address for address in self.addresses if address != current)]

    def _adopt(self, server: Server) -> None:
        with self._lock:
            before, self._current = self._current, server
            (server if self._over.is_set() else before).channel.close()

    def _server(self, address: str, channel: grpc.Channel) -> Server:
        return Server(address, channel, DevicesStub(channel))
