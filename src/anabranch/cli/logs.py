"""The log lines of servers and devices: on stderr, so that stdout stays for answers.

A line has its time in ISO 8601 with the zone, its level and its text. As JSON it also has what the text
speaks of in fields of their own (`version`, `updates`, `client`, `reason` ...), where it was said with such.
"""

from __future__ import annotations

import logging
import sys
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

from anabranch.cli.output import json_line
from anabranch.core.config.secrets import masked_text
from anabranch.core.errors import ConfigError
from anabranch.core.text import LAYOUT, visible
from anabranch.support.job import JOB
from anabranch.support.tracing import begin_tracing, trace_id

log = logging.getLogger("anabranch")

LEVELS = ("debug", "info", "warning", "error")

GRPC = "grpc._cython.cygrpc"  # the log of a server's calls

CONTINUED = "\n  "  # at the margin a line begins of its own: none is forged by what somebody has said

_LOGGED = "What is logged: debug, info, warning or error."
LogLevel = Annotated[str, typer.Option("--log-level", help=_LOGGED, metavar="LEVEL")]
DeviceLogLevel = Annotated[
    str,
    typer.Option("--log-level", help=f"{_LOGGED} Steps of a device are told from info on.", metavar="LEVEL"),
]


class _Lines(logging.Formatter):
    """Plain lines, with the job that they are of if there are several."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line without a traceback."""
        record.message = record.message.replace("\n", CONTINUED)
        if job := JOB.get():
            record.message = f"job {job}: {record.message}"
        return super().formatMessage(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002
        """When it was, here: `2026-03-01T14:05:09.123+01:00`."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


class _JsonLines(_Lines):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record with its fields, and with its traceback if it has one."""
        text = record.getMessage()
        if record.exc_text:
            text += "\n" + record.exc_text
        line = {"at": self.formatTime(record), "level": record.levelname, "text": text}
        if (job := JOB.get()) != "":
            line["job"] = job
        if (trace := trace_id()) != "":
            line["trace_id"] = trace
        return json_line({**line, **getattr(record, "fields", {})}).rstrip()


def is_json() -> bool:
    """Whether this process logs JSON lines on stderr."""
    return any(isinstance(handler.formatter, _JsonLines) for handler in logging.getLogger().handlers)


def _mask_secrets(record: logging.LogRecord) -> bool:
    """A filter that lets everything through, but for passwords."""
    record.msg, record.args = visible(masked_text(record.getMessage()), LAYOUT), None
    if record.exc_info:
        record.exc_text = masked_text(logging.Formatter().formatException(record.exc_info))
    return True


def _is_no_hangup(record: logging.LogRecord) -> bool:
    """A filter of gRPC's log: a caller who goes away in the midst of an answer is no error of a server."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


def set_up_logging(as_json: bool, level: str = "info", service: str = "") -> None:
    """Log from this level on: in colour on a terminal, else plain or JSON. Raises `ConfigError`.

    A `service` of this name is traced as well, if the environment wants that.
    """
    if service:
        begin_tracing(service)
    if level.lower() not in LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LEVELS)}, not {level!r}")
    handler: logging.Handler = logging.StreamHandler()
    if as_json:
        handler.setFormatter(_JsonLines())
    elif sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler.setFormatter(_Lines())
    handler.addFilter(_mask_secrets)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it introduces itself at length
    logging.getLogger(GRPC).addFilter(_is_no_hangup)
    logging.getLogger("asyncio").setLevel(logging.INFO)
