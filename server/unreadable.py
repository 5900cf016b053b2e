"""Requests that cannot be read: answered as what they are, INVALID_ARGUMENT, and not worth a line in the log.

Left alone, gRPC reads a request before the handler sees it, and what it cannot read becomes UNKNOWN with a
traceback in the log: a stranger could fill the disk with them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.message import DecodeError
from grpc import HandlerCallDetails, aio

from anabranch.core.errors import InvalidUpdate
from anabranch.server.handlers import Continuation, around, behaviour_name
from anabranch.server.rpc_errors import Context, abort

Read = Callable[[bytes], Any]


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
    if handler.request_streaming and handler.response_streaming:
        # The handler meets the error where it takes the next message.
        return handler._replace(request_deserializer=read)

    @asynccontextmanager
    async def requests(_: Any, context: Context) -> AsyncIterator[_Requests]:
        yield _Requests(context, read)

    @asynccontextmanager
    async def request(data: bytes, context: Context) -> AsyncIterator[Any]:
        try:
            found = read(data)
        except InvalidUpdate as error:
            await abort(context, error)
        yield found

    done = around(handler, requests if handler.request_streaming else request)
    return handler._replace(request_deserializer=None, **{behaviour_name(handler): done})


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
