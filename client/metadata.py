"""What is said with each call of a channel, in gRPC's metadata: its trace, its job."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import grpc

Said = Sequence[tuple[str, str]]
Details = namedtuple(
    "Details", ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression")
)


class SaysMore(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds what `more` gives at each call."""

    def __init__(self, more: Callable[[], Said]) -> None:
        self._more = more

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        """A call with one answer."""
        return continuation(self._told(details), request)

    intercept_unary_stream: Any = intercept_unary_unary
    intercept_stream_unary: Any = intercept_unary_unary
    intercept_stream_stream: Any = intercept_unary_unary

    def _told(self, details: Any) -> Any:
        said = self._more()
        if not said:
            return details
        metadata = [*(details.metadata or ()), *said]
        more = (getattr(details, name, None) for name in ("wait_for_ready", "compression"))
        return Details(details.method, details.timeout, metadata, details.credentials, *more)


def saying(channel: grpc.Channel, more: Callable[[], Said]) -> grpc.Channel:
    """The channel, whose calls say more."""
    return grpc.intercept_channel(channel, SaysMore(more))
