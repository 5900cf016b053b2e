"""What a service manager is told: that the server serves, that it is alive, that it ends (`sd_notify`).

A datagram to the socket that `NOTIFY_SOCKET` names; without one nothing is said. Alive means that the writer
answers: a disk that hangs, or a thread that waits for ever, ends the beats, and the manager starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress

from anabranch.core.errors import AnabranchError
from anabranch.server.writer import Writer

log = logging.getLogger(__name__)

SOCKET, WATCHDOG = "NOTIFY_SOCKET", "WATCHDOG_USEC"
READY, STOPPING, ALIVE = "READY=1", "STOPPING=1", "WATCHDOG=1"
BEATS = 4  # within the time after which the manager takes it for dead


def notify(*lines: str) -> None:
    """Tell the manager, if there is one; it is no error if it does not hear."""
    address = os.environ.get(SOCKET, "")
    if not address:
        return
    if address.startswith("@"):  # a name of Linux's own, in no folder
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
            to.sendto("\n".join(lines).encode(), address)
    except OSError as error:
        log.warning("%s=%s cannot be told %s: %s", SOCKET, address, lines[0], error)


def beat_s() -> float:
    """How often the manager wants to hear that the server is alive, seconds; 0: not at all."""
    try:
        return int(os.environ.get(WATCHDOG, "0")) / 1e6 / BEATS
    except ValueError:
        return 0.0


async def keep_alive(writers: Callable[[], Iterable[Writer]], every_s: float) -> None:
    """Tell the manager so, for as long as the writers of the moment answer."""
    while every_s > 0:
        for writer in writers():
            with suppress(AnabranchError):  # it has too much to do, or goes down: it has answered
                await writer.look(lambda _: None)
        notify(ALIVE)
        await asyncio.sleep(every_s)
