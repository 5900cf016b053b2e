"""Worker processes of a pool that meet, so that each of them is at work."""

from __future__ import annotations

from pathlib import Path

from anabranch.host.build import said


def says_first(pipe: Path, mode: str, text: str = "a warning") -> bool:
    """Whether this process is the first to say a text; `pipe` is opened at both ends, or not at all."""
    with pipe.open(mode):
        return said.is_new(text)
