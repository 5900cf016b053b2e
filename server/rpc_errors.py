"""Errors of the package as gRPC statuses: one table (`OUTCOMES` in `core/errors.py`), and decorators.

These ask the gate of the port who calls, first of all.

A failed call carries `anabranch-error: <class name>` in its trailing metadata, and
`retry-after-s: <earliest>,<latest>` where the caller should try again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from grpc import aio

from anabranch.core.errors import ERROR_KEY, FALLBACK, RETRY_KEY, AnabranchError, outcome_of
from anabranch.server.gate import Caller, Gate
from anabranch.server.outage import Outage

log = logging.getLogger(__name__)

Context = aio.ServicerContext[Any, Any]


class Guarded:
    """A servicer of a port with a gate.

    `outage`: says what devices are told of the store's errors; None where callers are told them as they are.
    """

    gate: Gate
    outage: Outage | None = None


Servicer = TypeVar("Servicer", bound=Guarded)
Request = TypeVar("Request")
Response = TypeVar("Response")
Method = Callable[[Any, Request, Caller], Awaitable[Response]]

RETRY_WINDOW_S = (0.5, 2.0)  # for a retryable error that names no window


async def abort(context: Context, error: Exception) -> NoReturn:
    """End the call with the status of the error. What was not raised on purpose stays in the log."""
    if not isinstance(error, AnabranchError):
        log.error("a call failed", exc_info=error)
        await context.abort(grpc.StatusCode[FALLBACK.grpc_status], "the server failed; its log says why")
    outcome = outcome_of(error)
    metadata = [(ERROR_KEY, type(error).__name__)]
    if outcome.retryable:
        earliest, latest = error.retry_after_s or RETRY_WINDOW_S
        metadata.append((RETRY_KEY, f"{earliest:g},{latest:g}"))
    await context.abort(grpc.StatusCode[outcome.grpc_status], str(error), tuple(metadata))


class _Aborting:
    """The last line of defence of a call: what is raised inside ends it with its status."""

    def __init__(self, servicer: Guarded, context: Context) -> None:
        self._outage, self._context = servicer.outage, context

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, aio.AbortError):
            await abort(self._context, error if self._outage is None else self._outage.told(error))


def answers(
    method: Callable[[Servicer, Request, Caller], Awaitable[Response]],
) -> Callable[[Servicer, Request, Context], Awaitable[Response]]:
    """A handler of a method that returns one response, its errors turned into statuses."""

    @functools.wraps(method)
    async def handler(self: Servicer, request: Request, context: Context) -> Response:
        async with _Aborting(self, context):
            return await method(self, request, await self.gate.caller(context))

    return handler


def behind(handler: Callable[[Any, Request, Context], Awaitable[Response]]) -> Method[Request, Response]:
    """The method that a handler answers by: for another door, which has seen to who calls."""
    method: Method[Request, Response] = handler.__wrapped__  # type: ignore[attr-defined] # `functools.wraps`
    return method


def streams(
    method: Callable[[Servicer, Request, Caller], AsyncIterator[Response]],
) -> Callable[[Servicer, Request, Context], AsyncIterator[Response]]:
    """A handler of a method that streams responses, its errors turned into statuses."""

    @functools.wraps(method)
    async def handler(self: Servicer, request: Request, context: Context) -> AsyncIterator[Response]:
        async with _Aborting(self, context):
            caller = await self.gate.caller(context)
            async for response in method(self, request, caller):
                await caller.check_still()
                yield response

    return handler


def converses(
    method: Callable[[Servicer, Context, Caller], Awaitable[None]],
) -> Callable[[Servicer, object, Context], Awaitable[None]]:
    """A handler that reads and writes by the context for itself, its errors turned into statuses."""

    @functools.wraps(method)
    async def handler(self: Servicer, requests: object, context: Context) -> None:  # noqa: ARG001
        async with _Aborting(self, context):
            await method(self, context, await self.gate.caller(context))

    return handler
