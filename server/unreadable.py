"""Requests that cannot be read: answered as what they are, INVALID_ARGUMENT, and not worth a line in the log.

Left alone, gRPC reads a request before the handler sees it, and what it cannot read becomes UNKNOWN with a
traceback in the log: a stranger could fill the disk with them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Any

from google.protobuf.message import DecodeError
from grpc import HandlerCallDetails, RpcMethodHandler, aio

from anabranch.core.errors import InvalidUpdate
from anabranch.server.rpc_errors import Context, abort

Read = Callable[[bytes], Any]
Continuation = Callable[[HandlerCallDetails], Awaitable["RpcMethodHandler[Any, Any] | None"]]


class ReadsRequests(aio.ServerInterceptor):
    """Reads the requests of every method in the place of gRPC."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}  # by method; strangers' methods have none

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: HandlerCallDetails
    ) -> Any:
        """The handler of the call, which reads for itself."""
        method = handler_call_details.method
        if method not in self._handlers:
            handler: Any = await continuation(handler_call_details)
            if handler is None or handler.request_deserializer is None:
                return handler
            self._handlers[method] = _reading(handler, method)
        return self._handlers[method]


def _reading(handler: Any, method: str) -> Any:
    read = _reader(handler.request_deserializer, method)
    if handler.request_streaming and not handler.response_streaming:
        return handler._replace(request_deserializer=None, stream_unary=_streamed(handler.stream_unary, read))
    if handler.request_streaming:  # the handler meets the error where it takes the next message
        return handler._replace(request_deserializer=read)
    if handler.response_streaming:
        # gRPC's health service has one that writes its answers, and gives none back.
        wrap: Any = _unary if iscoroutinefunction(handler.unary_stream) else _stream
        return handler._replace(request_deserializer=None, unary_stream=wrap(handler.unary_stream, read))
    return handler._replace(request_deserializer=None, unary_unary=_unary(handler.unary_unary, read))


def _reader(read: Read, method: str) -> Read:
    def reader(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            name = method.rpartition("/")[2]
            raise InvalidUpdate(
                f"{len(data)} bytes are no request of {name}: install the same version on both sides"
            ) from None

    return reader


def _unary(behaviour: Callable[[Any, Context], Awaitable[Any]], read: Read) -> Any:
    async def handler(data: bytes, context: Context) -> Any:
        try:
            request = read(data)
        except InvalidUpdate as error:
            await abort(context, error)
        return await behaviour(request, context)

    return handler


class _Requests:
    """The requests of a stream. gRPC's own iterator holds on to each until the next one comes, if ever."""

    def __init__(self, context: Context, read: Read) -> None:
        self._context, self._read = context, read

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        data = await self._context.read()
        if data is aio.EOF:
            raise StopAsyncIteration
        return self._read(data)


def _streamed(behaviour: Callable[[Any, Context], Awaitable[Any]], read: Read) -> Any:
    async def handler(_: Any, context: Context) -> Any:
        return await behaviour(_Requests(context, read), context)

    return handler


def _stream(behaviour: Callable[[Any, Context], AsyncIterator[Any]], read: Read) -> Any:
    async def handler(data: bytes, context: Context) -> AsyncIterator[Any]:
        try:
            request = read(data)
        except InvalidUpdate as error:
            await abort(context, error)
        async for response in behaviour(request, context):
            yield response

    return handler
