"""Of which job it is that something is logged, in a process that serves several."""

from __future__ import annotations

from contextvars import ContextVar

JOB: ContextVar[str] = ContextVar("job", default="")
