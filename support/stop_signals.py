"""What ends a process in good order."""

from __future__ import annotations

import signal


def stop_signals() -> list[signal.Signals]:
    """Ctrl-C, SIGTERM, and the end of its terminal, which `nohup` keeps from it."""
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *(() if under_nohup else (signal.SIGHUP,))]
