"""Counts the calls of a port, by method and code, as they end: outside of all else that handles them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
from grpc import HandlerCallDetails, aio

from anabranch.core.errors import ERROR_KEY, Overloaded, outcome_of
from anabranch.server.handlers import OURS, Continuation, around, behaviour_name
from anabranch.server.metrics import Metrics
from anabranch.server.rpc_errors import Context

SHED = (ERROR_KEY, Overloaded.__name__)
CODES = {code.value[0]: code.name for code in grpc.StatusCode}


class CountsCalls(aio.ServerInterceptor):
    """The first of a port's interceptors."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._handlers: dict[str, Any] = {}  # by method

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: HandlerCallDetails
    ) -> Any:
        """The handler of the call, which is counted when it ends."""
        method = handler_call_details.method
        if method not in self._handlers:
            handler: Any = await continuation(handler_call_details)
            if handler is None or not method.startswith(OURS):
                return handler
            self._handlers[method] = self._counted(handler, method.rpartition("/")[2])
        return self._handlers[method]

    def _counted(self, handler: Any, method: str) -> Any:
        @asynccontextmanager
        async def counted(request: Any, context: Context) -> AsyncIterator[Any]:
            with counting(self._metrics, method, context):
                yield request

        return handler._replace(**{behaviour_name(handler): around(handler, counted)})


@contextmanager
def counting(metrics: Metrics, method: str, context: Any) -> Iterator[None]:
    """Inside is a call, or a request of a stream that stands for one, which is counted as it ends.

    With the code of what it raises, or else of its context.
    """
    code, shed = "", None
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        code = grpc.StatusCode.CANCELLED.name
        raise
    except aio.AbortError:  # the context has it
        raise
    except Exception as error:  # of a request, whose stream ends by it
        code, shed = outcome_of(error).grpc_status, str(error) if isinstance(error, Overloaded) else None
        raise
    finally:
        if SHED in context.trailing_metadata():
            shed = context.details()
        metrics.called(method, code or _name(context.code()), shed)


def _name(code: Any) -> str:
    """GRPC says it as a number, or as one of its own; nothing where all went well."""
    return (
        code.name if isinstance(code, grpc.StatusCode) else CODES.get(code or 0, grpc.StatusCode.UNKNOWN.name)
    )
