"""The places of a guarded port: a member has its share of the calls that gRPC takes at a time, and no more.

GRPC counts a call from its headers on, so a member's place is taken there. Left alone, a unary call comes to
its handler when its request is here, and for a request that does not come gRPC waits without end; health and
reflection ask no gate. So whoever has a certificate, or had one, could hold all calls of a port.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from inspect import iscoroutinefunction
from typing import Any, NoReturn

from grpc import HandlerCallDetails, aio

from anabranch.core.errors import AnabranchError, InvalidUpdate, Overloaded, Unavailable
from anabranch.identity.certificates import Kind, Peer
from anabranch.server.gate import Gate
from anabranch.server.handlers import OURS, Behaviour, Continuation, around, behaviour_name
from anabranch.server.members import LOOK_S
from anabranch.server.outage import Outage
from anabranch.server.rpc_errors import Context, abort

REFUSAL_S = 10.0  # so long may a refusal be on its way to who reads nothing

# Who calls, and its request or the stream of them.
Begun = tuple[Peer, Any]
Begin = Callable[[Any, Context], Awaitable[Begun]]


class Places:
    """How many calls each member has under way on a port: who answers none of them leaves room for others."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._taken: Counter[tuple[Kind, str]] = Counter()

    def take(self, peer: Peer, context: Any) -> None:
        """One more call of a member, until gRPC has done with it. Raises `Overloaded`."""
        who = peer.kind, peer.name
        if self._taken[who] >= self._each:
            raise Overloaded(
                f"{peer.kind} {peer.name!r} has {self._each} calls under way, as many as one may "
                "(limits.member_calls_max): wait for their answers, or end them"
            )
        self._taken[who] += 1
        context.add_done_callback(lambda _: self._leave(who))

    def _leave(self, who: tuple[Kind, str]) -> None:
        self._taken[who] -= 1
        if not self._taken[who]:
            del self._taken[who]


class TakesPlaces(aio.ServerInterceptor):
    """Of a port with this gate: a call begins with its headers, and has a place from there on.

    It stands behind what counts calls, which remembers the handlers, and before what reads requests.
    `places`: None where members may have as many calls as they like. A request that is one message is here
    within `request_s` seconds, or its call is cut. What is not ours and streams ends with the certificate.
    `outage`: says what devices are told where the register fails; None where callers are told it as it is.
    """

    def __init__(
        self, gate: Gate, places: Places | None, request_s: float, outage: Outage | None = None
    ) -> None:
        self._gate, self._places, self._request_s, self._outage = gate, places, request_s, outage

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: HandlerCallDetails
    ) -> Any:
        """The handler of the call. It takes requests as a stream, so that gRPC waits for none before it."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = behaviour_name(handler)
        begin = self._with_requests if handler.request_streaming else self._with_request
        if handler.response_streaming and not handler_call_details.method.startswith(OURS):
            begun = self._while_it_counts(begin, getattr(handler, kind))
        else:
            begun = _after(begin, handler)
        streamed = "stream_stream" if handler.response_streaming else "stream_unary"
        return handler._replace(**{"request_streaming": True, kind: None, streamed: begun})

    async def _with_requests(self, requests: Any, context: Context) -> Begun:
        return await self._admitted(context), requests

    async def _with_request(self, requests: Any, context: Context) -> Begun:  # noqa: ARG002
        peer = await self._admitted(context)
        try:
            async with asyncio.timeout(self._request_s):
                request = await context.read()
        except TimeoutError:
            await _refuse(context, Unavailable("the request came too slowly and was cut: call again"))
        if request is aio.EOF:
            await _refuse(context, InvalidUpdate("a call without its request: call again with one"))
        return peer, request

    async def _admitted(self, context: Context) -> Peer:
        """Who calls, and has a place now: taken before the wait for the register, which may be long."""
        try:
            peer = self._gate.shown(context)
            if self._places is not None:
                self._places.take(peer, context)
            await self._gate.check(peer)
        except AnabranchError as error:
            await _refuse(context, self._told(error))
        return peer

    def _told(self, error: AnabranchError) -> Exception:
        """By a register's own error a device would discard its result, and end."""
        return error if self._outage is None else self._outage.told(error)

    def _while_it_counts(self, begin: Begin, behaviour: Behaviour) -> Behaviour:
        """For services that ask no gate before each message that goes out."""

        async def handler(requests: Any, context: Context) -> None:
            peer, request = await begin(requests, context)
            answering = asyncio.create_task(_written(behaviour, request, context))
            try:
                while not (await asyncio.wait({answering}, timeout=LOOK_S))[0]:
                    await self._gate.check(peer)
                await answering
            except AnabranchError as error:
                answering.cancel()  # it writes no more
                await _refuse(context, self._told(error))
            finally:
                answering.cancel()

        return handler


def _after(begin: Begin, handler: Any) -> Behaviour:
    @asynccontextmanager
    async def begun(requests: Any, context: Context) -> AsyncIterator[Any]:
        _, request = await begin(requests, context)
        yield request

    return around(handler, begun)


async def _written(behaviour: Behaviour, request: Any, context: Context) -> None:
    if iscoroutinefunction(behaviour):
        await behaviour(request, context)
        return
    async for response in behaviour(request, context):
        await context.write(response)


async def _refuse(context: Context, error: Exception) -> NoReturn:
    """End a call with the status of the error; one whose member does not read even that is let go."""
    task = asyncio.current_task()
    assert task is not None, "gRPC runs each call in a task"
    late = asyncio.get_running_loop().call_later(REFUSAL_S, task.cancel)
    try:
        await abort(context, error)
    finally:
        late.cancel()
