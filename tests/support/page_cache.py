"""What the system keeps of files in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest


def pages_in_cache(path: Path) -> int:
    """How many pages of a file the system has in memory (Linux)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        found = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        values = np.frombuffer(mapped, np.uint8)
        address, size = ctypes.c_void_p(values.ctypes.data), ctypes.c_size_t(len(mapped))
        assert ctypes.CDLL(None).mincore(address, size, found) == 0
        del values
        return sum(page & 1 for page in found)


def skip_unless_cached(folder: Path) -> None:
    """Skip the test where files of a folder lie in memory alone, or nobody says what does."""
    if sys.platform != "linux":
        pytest.skip("mincore is Linux's")
    with (folder / "known").open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_cache(folder / "known"):
        pytest.skip("files of this system lie in memory alone")
    (folder / "known").unlink()
