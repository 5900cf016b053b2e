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

from anabranch.client.health import Answer, asked_health, says_serving
from anabranch.identity.addresses import parse_addresses
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub

LOOK_S = 1.5  # a lost packet of a new connection goes again after a second
LOOK_S_MAX = 20.0
LOOK_SHARE = 1 / 20  # of the time that nobody has served: a long link takes longer
AHEAD_S = 0.5  # that the current server has to say that it serves, once another has said so
PAUSE_S = 0.25
PAUSE_MAX_S = 20.0
# Of the time that nobody has served: a server that was away for 5 s is found within 2 s of its return. A look
# that is refused is over at once: with short pauses thousands of devices would knock without end.
PAUSE_SHARE = 1 / 3
CLOSE_S = 2.0
LOOKOUT = "anabranch-lookout"


def pause_after(looked_s: float) -> float:
    """Seconds until the next look, where for so many nobody has served."""
    longest_s = min(PAUSE_MAX_S, max(PAUSE_S, PAUSE_SHARE * looked_s))
    return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


@dataclass(frozen=True)
class Server:
    """One server, and the connection to it."""

    address: str
    channel: grpc.Channel
    stub: DevicesStub


class Servers:
    """The servers of a run, of which one leads: calls go to the one that served last.

    `connect` makes a channel to an address; what it makes may change: see `reconnect`. Nothing is connected
    before the first call. `returned` is called, in a thread of the lookout, when a server serves after none
    did, or another one.
    """

    def __init__(self, addresses: str, connect: Callable[[str], grpc.Channel]) -> None:
        self.addresses = parse_addresses(addresses)
        self.returned: Callable[[], None] = lambda: None
        self._connect = connect
        # Guards what is below. No channel is closed under it: that waits for callbacks, and they for it.
        self._changed = threading.Condition()
        self._over = False
        self._lookout: threading.Thread | None = None
        self._current = self._connected(self.addresses[0])
        self._former: grpc.Channel | None = None
        self._answered = False  # since the newest failure

    @property
    def current(self) -> Server:
        """Where calls go."""
        return self._current

    def failed(self, server: Server) -> None:
        """A call to this server was not answered: look whether one serves, unless that is being done."""
        with self._changed:
            if self._over or server is not self._current:
                return
            self._answered = False  # for a lookout that is under way as well
            if self._lookout is None or not self._lookout.is_alive():  # which an error may have ended
                self._lookout = threading.Thread(target=self._look, name=LOOKOUT, daemon=True)
                self._lookout.start()

    def answered(self, server: Server) -> None:
        """A call to this server was answered: nobody need look for another, nor cut what goes on over it."""
        with self._changed:
            if server is self._current:
                self._answered = True
                self._changed.notify_all()

    def reconnect(self) -> None:
        """Go on over a new connection to the same server, as `connect` makes another kind by now."""
        with self._changed:
            if self._over:
                return
            # Another thread may have a call under way: what it goes over is closed the next time.
            former, self._former = self._former, self._current.channel
            self._current = self._connected(self._current.address)
        if former is not None:
            former.close()

    def close(self) -> None:
        """Cut off whatever is under way."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            lookout = self._lookout
        self._current.channel.close()
        if self._former is not None:
            self._former.close()
        if lookout is not None and lookout is not threading.current_thread():
            lookout.join(CLOSE_S)

    def _look(self) -> None:
        began, nobody, left = time.monotonic(), False, list[grpc.Channel]()
        while True:
            before, looked_s = self._current, time.monotonic() - began
            found = self._find(before, nobody, min(LOOK_S_MAX, max(LOOK_S, LOOK_SHARE * looked_s)))
            with self._changed:
                if found is None:
                    nobody = True
                    self._changed.wait_for(self._is_settled, pause_after(looked_s))
                if found is not None or self._is_settled():
                    self._lookout = None  # what fails from now on begins another
                    if found is not None and found is not before:
                        left = self._adopt(found, before)
                    break
        for channel in left:
            channel.close()
        if not self._over and (nobody or found is not before):
            self.returned()

    def _is_settled(self) -> bool:
        """Whether nobody need look any more."""
        return self._over or self._answered

    def _find(self, current: Server, nobody: bool, look_s: float = LOOK_S) -> Server | None:
        """A server that serves; the current one as it is, if it has served all along."""
        # The current one first: a call to it may have been lost alone.
        in_turn = dict.fromkeys([current.address, *self.addresses])
        asked = {address: self._connect(address) for address in in_turn}
        address = self._first_serving({to: asked_health(channel, look_s) for to, channel in asked.items()})
        found: Server | None = None
        if address == current.address and not nobody:
            found = current
        elif address is not None:
            found = self._server(address, asked.pop(address))
        for channel in asked.values():
            channel.close()
        return found

    def _first_serving(self, calls: dict[str, Answer]) -> str | None:
        """Who says first that it serves, without a wait for those that say nothing; None: nobody, so far."""
        current, *_ = calls.values()
        for call in calls.values():
            call.add_done_callback(self._tell)

        def serving() -> str | None:
            return next((to for to, call in calls.items() if call.done() and says_serving(call)), None)

        def is_heard() -> bool:
            return serving() is not None or all(call.done() for call in calls.values())

        with self._changed:
            self._changed.wait_for(lambda: self._is_settled() or is_heard())
            self._changed.wait_for(lambda: self._is_settled() or bool(current.done()), AHEAD_S)
            return serving()

    def _tell(self, _call: Answer) -> None:
        with self._changed:
            self._changed.notify_all()

    def _adopt(self, server: Server, before: Server) -> list[grpc.Channel]:
        """Have calls go there, unless `close` was faster, or an answer; anew if `reconnect` was.

        Returns what is of no use from now on.
        """
        with self._changed:
            if self._is_settled():
                return [server.channel]
            replaced = self._current
            if replaced is before:
                self._current = server
                return [replaced.channel]
            self._current = self._connected(server.address)
            return [replaced.channel, server.channel]

    def _connected(self, address: str) -> Server:
        return self._server(address, self._connect(address))

    def _server(self, address: str, channel: grpc.Channel) -> Server:
        return Server(address, channel, DevicesStub(channel))
