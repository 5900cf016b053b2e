"""A process that ends with the one that started it, which holds the other end of its standard input."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from anabranch.client.stopping import Bell

UntilEof = Annotated[bool, typer.Option("--until-eof", hidden=True)]


def stop_at_eof(stop: Callable[[], None]) -> None:
    """Have `stop` called, in a thread of its own, once whoever has started this process is gone."""

    def await_eof() -> None:
        while os.read(sys.stdin.fileno(), 4096):  # no lock is held while it waits: a process may end
            pass
        stop()

    threading.Thread(target=await_eof, daemon=True).start()


def bell_of(until_eof: bool) -> Bell:
    """A device's bell; with `until_eof` it stops one whose starter is gone."""
    from anabranch.client.stopping import Bell

    bell = Bell()
    if until_eof:
        stop_at_eof(bell.stop)
    return bell
