"""Ports that a test may begin to listen on, leave, and listen on again."""

from __future__ import annotations

import errno
import random
import socket

# Below those that the system gives to whoever asks for any: nobody gets one between two lives of its server.
FIRST, LAST = 10_000, 32_767
_draws = random.SystemRandom()


def free_port() -> int:
    """A port that nobody has, and that nobody is given."""
    while True:
        port = _draws.randint(FIRST, LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        return port
