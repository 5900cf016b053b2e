"""Where the command line starts. It imports next to nothing: Ctrl-C is heard from the first moment on."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from types import FrameType

PLATFORM = os.name
INTERRUPTED = 130  # as a shell says of what ended by SIGINT
LOOKING_ON = (["health"], ["admin"], ["keeper", "health"])
FIRST_TO_GO = 1000  # of what Linux ends where memory is short, the greatest there is


def main() -> None:
    """Run a command. Its exit code is one of `core.errors.OUTCOMES`, or 130 after Ctrl-C."""
    if PLATFORM == "nt":
        sys.exit(_refuse_windows())
    if any(sys.argv[1 : len(words) + 1] == words for words in LOOKING_ON):
        _give_way()
    _open_streams()
    if os.getpid() == 1:
        _heed_stops()
    before = signal.getsignal(signal.SIGINT)
    # There is nothing to tidy up yet, and not every library lets go of its import by an exception.
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    gc.disable()  # modules stay, and nothing else is there yet: `loaded` enables it
    from anabranch.cli.program import run
    from anabranch.support.stop_signals import at_safe_points

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, at_safe_points(before))
    try:
        sys.exit(run())
    finally:
        signal.signal(signal.SIGINT, before)


def _open_streams() -> None:
    """Some start a program with its streams closed: files would get their numbers, and what goes there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the least number that is free
            os.set_inheritable(nowhere, True)
            setattr(sys, name, open(nowhere, mode))  # noqa: SIM115 - as long as the process lives
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.encoding != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: no line ends the command


def _give_way() -> None:
    """A check of health in a container takes of the server's memory: it ends first, not the server."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # Linux alone has it
        file.write(str(FIRST_TO_GO))


def _heed_stops() -> None:
    """For the first process of a container: a signal without a handler does nothing to that one.

    A stop that comes before the command listens would be lost, and the container killed when it is over.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda came, _: os._exit(128 + came))


def _refuse_windows() -> int:
    """Files are locked, flushed and replaced as POSIX has it: elsewhere nothing would be promised."""
    sys.stderr.write(
        "error: anabranch runs on Linux and macOS: on Windows use WSL 2, or the container images\n"
    )
    return 2


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
