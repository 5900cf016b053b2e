"""One service for several runs: each call goes to the service of the run that it names.

The methods are those of the service itself, so that what counts calls and reads requests finds nothing new.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from inspect import isasyncgenfunction
from typing import Any

from anabranch.core.errors import AnabranchError
from anabranch.server.rpc_errors import Context, abort

# The service of the run that a call is of, for as long as the call lasts. Raises errors of `core/errors.py`.
Chosen = Callable[[Context], AbstractContextManager[Any]]


def by_job(service: type[Any], chosen: Chosen) -> Any:
    """What answers in the place of services of this class, of which each call has its own."""
    names = [name for name in dir(service) if name[0].isupper()]
    methods = {
        name: (_streams if isasyncgenfunction(getattr(service, name)) else _answers)(name, chosen)
        for name in names
    }
    return type(f"{service.__name__}ByJob", (), methods)()


def _answers(name: str, chosen: Chosen) -> Any:
    async def method(self: Any, request: Any, context: Context) -> Any:  # noqa: ARG001 - a service's
        try:
            with chosen(context) as service:
                return await getattr(service, name)(request, context)
        except AnabranchError as error:
            await abort(context, error)

    return method


def _streams(name: str, chosen: Chosen) -> Any:
    async def method(self: Any, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ARG001
        try:
            with chosen(context) as service:
                async for response in getattr(service, name)(request, context):
                    yield response
        except AnabranchError as error:
            await abort(context, error)

    return method
