"""Ports that a test may begin to listen on, leave, and listen on again."""

from __future__ import annotations

import atexit
import errno
import random
import socket

# Below those that the system gives to whoever asks for any: nobody gets one between two lives of its server.
FIRST, LAST = 10_000, 32_767
_draws = random.SystemRandom()
# Of UDP, which nobody else here uses: a port is drawn once among all the tests that run on this machine, be
# it that its server is not there yet, or is dead for now.
_held: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody has, and that nobody is given as long as this process lives."""
    while True:
        port = _draws.randint(FIRST, LAST)
        mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with socket.socket() as probe:
            try:
                mark.bind(("127.0.0.1", port))
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                mark.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        _held.append(mark)
        return port


@atexit.register
def _let_go() -> None:
    for mark in _held:
        mark.close()
