"""OpenTelemetry's traces, off unless `OTEL_TRACES_EXPORTER` says where they go: one update is one trace.

The ids of a trace and of its first span come of the task's id: so device and server, and whoever takes over
from a process that was killed, speak of the same trace, and nothing of it is kept anywhere. Which span a call
is of travels as W3C's `traceparent` in gRPC's metadata. Without tracing nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from anabranch.core.errors import ConfigError

EXPORTER = "OTEL_TRACES_EXPORTER"  # `otlp`, or `file:PATH`: a line of JSON for each span
TRACEPARENT = "traceparent"
ID_BYTES, SPAN_BYTES = 16, 8

_tracer: Any = None
_next: ContextVar[tuple[int, int]] = ContextVar("next", default=(0, 0))  # trace and span that come next
_begun_ns: dict[str, int] = {}  # of the tasks whose updates this process makes: when they began
BEGUN_MAX = 100


def begin_tracing(service: str) -> None:
    """Trace from now on, if the environment wants it. Raises `ConfigError`."""
    global _tracer  # noqa: PLW0603 - as OpenTelemetry's own provider: one process, one destination
    wanted = os.environ.get(EXPORTER, "none")
    if wanted in ("", "none"):
        _tracer = None
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        """Random ones, unless it is said which come next."""

        def generate_trace_id(self) -> int:
            return _next.get()[0] or int(super().generate_trace_id())

        def generate_span_id(self) -> int:
            return _next.get()[1] or int(super().generate_span_id())

    provider = TracerProvider(
        resource=Resource.create({"service.name": service, "process.pid": os.getpid()}), id_generator=Ids()
    )
    provider.add_span_processor(_processor(wanted))
    _tracer = provider.get_tracer("anabranch")


def is_tracing() -> bool:
    """Whether anything is traced."""
    return _tracer is not None


@contextmanager
def span(name: str, task_id: str, parent: str = "", **attributes: Any) -> Iterator[None]:
    """Inside is a part of a task's update. `parent`: the `traceparent` that came with it, if one did."""
    if _tracer is None:
        yield
        return
    with _tracer.start_as_current_span(name, _context(task_id, parent), attributes=attributes):
        yield


@contextmanager
def part(name: str) -> Iterator[None]:
    """Inside is a part of the span of the moment; without one nothing is traced."""
    if _tracer is None or not trace_id():
        yield
        return
    with _tracer.start_as_current_span(name):
        yield


def span_of(name: str, context: Any, began_ns: int, **attributes: Any) -> None:
    """A span that ends now, under what `here` has given."""
    if _tracer is not None and context is not None:
        _tracer.start_span(name, context, start_time=began_ns, attributes=attributes).end()


def span_of_task(name: str, task_id: str, **attributes: Any) -> None:
    """A moment in a task's trace."""
    if _tracer is not None:
        _tracer.start_span(name, _context(task_id), attributes=attributes).end()


def begun(task_id: str) -> None:
    """A device begins with a task: its update's first span begins here."""
    if _tracer is not None:
        while len(_begun_ns) >= BEGUN_MAX:
            del _begun_ns[next(iter(_begun_ns))]
        _begun_ns[task_id] = time.time_ns()


def answered(task_id: str, **attributes: Any) -> None:
    """A task's update was acknowledged: its first span, which all others are under, ends."""
    if _tracer is None:
        return
    from opentelemetry.context import Context

    began_ns = _begun_ns.pop(task_id, None)  # None: in a process that is gone
    token = _next.set(ids_of(task_id))
    try:
        made = _tracer.start_span("update", Context(), start_time=began_ns)
    finally:
        _next.reset(token)
    made.set_attributes({"task": task_id, **attributes})
    made.end()


def here() -> Any:
    """The context of the moment, for `span_of` in another thread; None where nothing is traced."""
    if _tracer is None:
        return None
    from opentelemetry import context

    return context.get_current() if trace_id() else None


def trace_id() -> str:
    """The trace of the moment, hex; empty where there is none."""
    if _tracer is None:
        return ""
    from opentelemetry import trace

    found = trace.get_current_span().get_span_context()
    return f"{found.trace_id:032x}" if found.is_valid else ""


def traceparent() -> str:
    """The span of the moment as W3C writes it; empty where there is none."""
    if not trace_id():
        return ""
    from opentelemetry import trace

    found = trace.get_current_span().get_span_context()
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}"


def ids_of(task_id: str) -> tuple[int, int]:
    """The ids of a task's trace and of its first span."""
    found = hashlib.sha256(f"anabranch trace of {task_id}".encode()).digest()
    return int.from_bytes(found[:ID_BYTES]), int.from_bytes(found[ID_BYTES : ID_BYTES + SPAN_BYTES])


def _context(task_id: str, parent: str = "") -> Any:
    """Under the span that a `traceparent` names, if it is of this task's trace, else under the first."""
    from opentelemetry import trace
    from opentelemetry.context import Context

    trace_number, span_number = ids_of(task_id)
    head, _, rest = parent.partition(f"00-{trace_number:032x}-")
    if parent and not head and len(rest) == 2 * SPAN_BYTES + 3:
        with suppress(ValueError):
            span_number = int(rest[: 2 * SPAN_BYTES], 16)
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    found = trace.SpanContext(trace_number, span_number, is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(found), Context())


def _processor(wanted: str) -> Any:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor

    if wanted == "otlp":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return BatchSpanProcessor(OTLPSpanExporter())
    kind, _, path = wanted.partition(":")
    if kind != "file" or not path:
        raise ConfigError(f"{EXPORTER} must be none, otlp or file:PATH, not {wanted!r}")
    lines = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - as long as the process
    return SimpleSpanProcessor(
        ConsoleSpanExporter(out=lines, formatter=lambda made: made.to_json(indent=None) + "\n")
    )
