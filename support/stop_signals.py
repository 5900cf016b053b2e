"""What ends a process in good order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def stop_signals() -> list[signal.Signals]:
    """Ctrl-C, SIGTERM, and the end of its terminal, which `nohup` keeps from it."""
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *(() if under_nohup else (signal.SIGHUP,))]


@contextmanager
def leaving_in_order() -> Iterator[None]:
    """Inside, the `stop_signals` raise: what was begun is tidied up. For the main thread.

    Ctrl-C does of itself; after the others the exit code is the one that a shell says of them.
    """

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    others = [number for number in stop_signals() if number != signal.SIGINT]
    before = {number: signal.signal(number, leave) for number in others}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
