"""When and where a run was made, and what ended it."""

from __future__ import annotations

import os
import platform
import signal
from datetime import UTC, datetime

from anabranch.reports.text import counted

STOPPED = {128 + number for number in (signal.SIGTERM, signal.SIGHUP)}  # exit codes


class StopRun(Exception):
    """Raised by a callback: the run ends here, as one that was interrupted, and is given back as it is."""


def started_now() -> str:
    """This moment with the machine's own zone, ISO 8601 to the second."""
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")


def moment(seconds: float) -> str:
    """A moment given in seconds since 1970, in the same way."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().isoformat(timespec="seconds")


def here() -> str:
    """This machine in a line: its name, its system, its CPUs, the Python that runs."""
    cpus = os.cpu_count() or 1
    system = f"{platform.system()} {platform.machine()}"
    cpus_text = counted(cpus, "CPU")
    return f"{platform.node()}: {system}, {cpus_text}, Python {platform.python_version()}"


def reason(error: BaseException) -> str:
    """What ended a run, in a line."""
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C"
    if isinstance(error, SystemExit):
        return "a signal to stop" if error.code in STOPPED else f"exit {error.code}"
    if isinstance(error, StopRun):
        return str(error) or "a callback"
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"
