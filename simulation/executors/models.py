"""Models that worker processes of this machine train from: each is written once, and read by all of them.

A file that a worker maps is in memory once, however many read it; a queue would copy it for each task.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

import numpy as np

from anabranch.core.params import Vector


class ModelFiles:
    """The files of the newest vectors, by the array that they are copies of.

    Whoever has been told a path may read it until `in_hand` others were asked for. They lie where Python
    puts temporary files (`TMPDIR`).
    """

    def __init__(self, in_hand: int) -> None:
        self._kept_max = in_hand + 1
        self._folder = Path(tempfile.mkdtemp(prefix="anabranch-models-"))
        self._kept: OrderedDict[int, tuple[Vector, Path]] = OrderedDict()
        self._count = 0

    def path(self, vector: Vector) -> Path:
        """Of the vector's copy. Nobody changes the vector."""
        known = self._kept.get(id(vector))
        if known is None or known[0] is not vector:
            self._count += 1
            known = self._kept[id(vector)] = vector, self._folder / f"{self._count}.npy"
            np.save(known[1], vector, allow_pickle=False)
        self._kept.move_to_end(id(vector))
        while len(self._kept) > self._kept_max:
            _, (_, oldest) = self._kept.popitem(last=False)
            oldest.unlink()
        return known[1]

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)


@lru_cache(maxsize=4)
def model_at(path: Path) -> Vector:
    """The vector; what is written into it is not written into the file."""
    mapped: Vector = np.load(path, mmap_mode="c", allow_pickle=False)
    return np.asarray(mapped)
