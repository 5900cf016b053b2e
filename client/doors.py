"""By which door a device's requests go: by a stream where the server has one, else each as a call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from anabranch.client.calls import CallDoor, Door
from anabranch.client.exchange import NotAnsweredError, StreamDoor
from anabranch.client.link import Link
from anabranch.client.servers import Server
from anabranch.core.config.ranges import BY_CALLS, BY_STREAM
from anabranch.core.errors import Unavailable

T = TypeVar("T")

CALLS_S = 60.0  # calls alone, once a stream has failed where a call was answered


class Doors:
    """For any thread. `kind`: `client.connection`; `auto` and `stream` differ where a stream fails alone.

    A stream has one request at a time: what another thread has to ask meanwhile goes as a call beside it, and
    need not wait behind a large payload.
    """

    def __init__(self, link: Link, stall_s: float, kind: str) -> None:
        self.kind = kind
        self._link, self._stall_s = link, stall_s
        self._turn = threading.Lock()  # of the stream
        self._exchange: StreamDoor | None = None
        self._server: Server | None = None  # that it goes to
        self._not_before = 0.0

    def close(self) -> None:
        """Cut off whatever is under way."""
        self.kind = BY_CALLS
        if (exchange := self._exchange) is not None:
            exchange.close()

    def ask(self, request: Callable[[Door], T], opens: bool = True) -> T:
        """What `request` brings by one of the doors; `opens`: it is worth a new stream.

        It is made again as a call where a stream says nothing of it. What gRPC raises becomes an error of the
        tree, as in `Link.calling`.
        """
        stub, failed = self._link.stub(), False
        with self._link.calling():
            if self.kind != BY_CALLS and self._turn.acquire(blocking=False):
                try:
                    if (exchange := self._opened(opens)) is not None:
                        return request(exchange)
                except NotAnsweredError as error:
                    failed = self._has_failed(error)
                except BaseException:
                    self._drop()
                    raise
                finally:
                    self._turn.release()
            answer = request(CallDoor(stub, self._stall_s))
        if failed:  # and not the server
            self._not_before = time.monotonic() + CALLS_S
        return answer

    def _opened(self, opens: bool) -> StreamDoor | None:
        server, exchange = self._link.servers.current, self._exchange
        if exchange is not None:
            if exchange.is_open and self._server is server:
                return exchange
            self._drop()
        if not opens or (self.kind != BY_STREAM and time.monotonic() < self._not_before):
            return None
        self._exchange, self._server = StreamDoor(server.channel, self._stall_s), server
        return self._exchange

    def _has_failed(self, error: NotAnsweredError) -> bool:
        """Whether the stream was of no use. Raises what it has failed by where there shall be no calls."""
        exchange = self._exchange
        self._drop()
        if exchange is None or exchange.proven:
            return False
        if self.kind == BY_STREAM:
            if isinstance(error.__cause__, grpc.RpcError):
                raise error.__cause__
            raise Unavailable(f"client.connection is 'stream', but {error}: with 'auto' calls are made")
        return True

    def _drop(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
