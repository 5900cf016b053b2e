"""What worker processes of a pool do: those that meet are each at work."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from anabranch.host.build import said


def says_first(pipe: Path, mode: str, text: str = "a warning") -> bool:
    """Whether this process is the first to say a text; `pipe` is opened at both ends, or not at all."""
    with pipe.open(mode):
        return said.is_new(text)


def told_twice(folder: Path) -> None:
    """Leaves a file when it is interrupted. Meanwhile Ctrl-C is passed on, where an error is handled."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        try:
            folder.joinpath("absent").read_text()
        except FileNotFoundError:
            os.kill(os.getpid(), signal.SIGINT)
        folder.joinpath("left").touch()
        raise
