"""What a test must leave as it found it, for those that follow in its process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from anabranch.cli import output

OURS = "anabranch"
WATCHED = ("", OURS, "alembic", "asyncio", "flwr", "grpc")  # the root's, ours, and those that ours sets
GRPC = logging.getLogger("grpc._cython.cygrpc")


class Standing(NamedTuple):
    """How a logger is set."""

    level: int = logging.NOTSET
    propagate: bool = True
    disabled: bool = False
    handlers: tuple[logging.Handler, ...] = ()
    filters: tuple[Any, ...] = ()

    @classmethod
    def of(cls, logger: logging.Logger) -> Standing:
        """How this one is set."""
        handlers = tuple(h for h in logger.handlers if not isinstance(h, logging.NullHandler))
        return cls(logger.level, logger.propagate, logger.disabled, handlers, tuple(logger.filters))

    def put_back(self, logger: logging.Logger) -> None:
        """Set the logger in this way."""
        logger.setLevel(self.level)
        logger.propagate, logger.disabled = self.propagate, self.disabled
        logger.handlers, logger.filters = list(self.handlers), list(self.filters)


def loggers() -> dict[str, logging.Logger]:
    """Those that are watched, by name; the root's is empty."""
    known = {"": logging.root, **logging.Logger.manager.loggerDict}
    named = ((name, found) for name, found in known.items() if name.partition(".")[0] in WATCHED)
    return {name: found for name, found in named if isinstance(found, logging.Logger)}


@contextmanager
def loggers_put_back() -> Iterator[list[str]]:
    """Inside, loggers may be set otherwise; afterwards the list says which were.

    What a library sets of its own is left alone, and of a logger that it has just made.
    """
    before = {name: Standing.of(logger) for name, logger in loggers().items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, logger in loggers().items():
            made = Standing() if name.partition(".")[0] == OURS else None
            found, now = before.get(name, made), Standing.of(logger)
            if found is not None and found != now:
                changed.append(f"{name or 'root'}: {found} is now {now}")
                found.put_back(logger)


@contextmanager
def stdout_put_back() -> Iterator[None]:
    """Inside, a command may keep stdout for its answers alone, which lasts as long as its process."""
    before = sys.stdout
    try:
        yield
    finally:
        while output._ALONE:
            with output._ALONE.pop() as own:
                os.dup2(own.fileno(), output.STDOUT)
        sys.stdout = before


_ends: list[Callable[[], object]] = []


def at_the_end(end: Callable[[], object]) -> None:
    """Call this when the test is over, however it ends: for a process or a thread that nobody else ends."""
    _ends.append(end)


@contextmanager
def ended() -> Iterator[None]:
    """Afterwards all that has begun inside is ended, the last first."""
    before = len(_ends)
    try:
        yield
    finally:
        while len(_ends) > before:
            _ends.pop()()


class FreedServers(logging.Filter):
    """Hears of gRPC's servers that are freed but were never stopped, and keeps their records from all others.

    Such a record has the object that is just being freed: see `anabranch.support.grpc_ports`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """None of gRPC's for debugging goes further."""
        if "__dealloc__" in str(record.msg):
            self._told.append(record.getMessage())
        return record.levelno > logging.DEBUG

    def taken(self) -> list[str]:
        """What was heard since this was asked last."""
        found, self._told = self._told, []
        return found


FREED = FreedServers()
GRPC.addFilter(FREED)
GRPC.setLevel(logging.DEBUG)  # it tells of them at no other level
