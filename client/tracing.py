"""Says with each call which span it is of: `traceparent` in gRPC's metadata, as W3C has it."""

from __future__ import annotations

import grpc

from anabranch.client.metadata import Said, saying
from anabranch.support.tracing import TRACEPARENT, is_tracing, traceparent


def traced(channel: grpc.Channel) -> grpc.Channel:
    """The channel itself, unless this process traces."""
    return saying(channel, _trace) if is_tracing() else channel


def _trace() -> Said:
    parent = traceparent()
    return [(TRACEPARENT, parent)] if parent else []
