"""What the interceptors of a port put round the handlers of its calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from inspect import iscoroutinefunction
from typing import Any

from grpc import HandlerCallDetails, RpcMethodHandler

from anabranch.server.rpc_errors import Context

OURS = "/anabranch."  # health and reflection are probes', strangers' methods are nobody's
Continuation = Callable[[HandlerCallDetails], Awaitable["RpcMethodHandler[Any, Any] | None"]]
Behaviour = Callable[[Any, Context], Any]
# What a behaviour gets in the place of a call's request, and what is round it as long as the call lasts.
Taken = Callable[[Any, Context], AbstractAsyncContextManager[Any]]


def behaviour_name(handler: Any) -> str:
    """By which name a handler has what it does: `unary_unary`, `stream_unary` and so on."""
    streams = handler.request_streaming, handler.response_streaming
    return "_".join("stream" if is_stream else "unary" for is_stream in streams)


def around(handler: Any, taken: Taken) -> Behaviour:
    """What a handler does, inside of `taken`, whichever way it answers."""
    behaviour: Behaviour = getattr(handler, behaviour_name(handler))

    async def answer(request: Any, context: Context) -> Any:
        async with taken(request, context) as given:
            return await behaviour(given, context)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        async with taken(request, context) as given:
            async for response in behaviour(given, context):
                yield response

    # Who streams and writes by itself, as gRPC's health service does, is awaited as for a single answer.
    return answer if not handler.response_streaming or iscoroutinefunction(behaviour) else stream
