"""Whether a path still leads to a file or folder that is held open."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def leads_to(path: Path, held: os.stat_result) -> bool:
    """Whether it does: not where that was moved, replaced or removed. Raises `OSError` if it cannot be told.

    Open files go with a folder that is moved, and names lead to what was put in its place.
    """
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), held)
    return False
