"""What all processes of a run of the tests have in common: the one that asks first makes it."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


def once(folder: Path, make: Callable[[Path], Path]) -> Path:
    """The path that `make` returns of what it makes in a folder: the process that asks first makes it."""
    made = folder.with_suffix(".made")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            made.write_text(str(make(folder)))
    return Path(made.read_text())
