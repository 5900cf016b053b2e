"""Models that worker processes of this machine train from: each is written once, and read by all of them.

A file that a worker maps is in memory once, however many read it; a queue would copy it for each task.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from anabranch.core.model.params import Vector

T = TypeVar("T")


class Newest(Generic[T]):
    """What was made of the newest vectors, once of each array; `drop` is told what is not kept any more."""

    def __init__(
        self, kept_max: int, make: Callable[[Vector], T], drop: Callable[[T], object] = lambda _: None
    ) -> None:
        self._kept_max, self._make, self._drop = kept_max, make, drop
        self._kept: OrderedDict[int, tuple[Vector, T]] = OrderedDict()

    def of(self, vector: Vector) -> T:
        """What is made of this array. Nobody changes it."""
        known = self._kept.get(id(vector))
        if known is None or known[0] is not vector:
            known = self._kept[id(vector)] = vector, self._make(vector)
        self._kept.move_to_end(id(vector))
        while len(self._kept) > self._kept_max:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._drop(oldest)
        return known[1]


class ModelFiles:
    """The files of the newest vectors, by the array that they are copies of.

    Whoever has been told a path may read it until `in_hand` others were asked for. They lie where Python
    puts temporary files (`TMPDIR`).
    """

    def __init__(self, in_hand: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="anabranch-models-"))
        self._files = Newest(in_hand + 1, self._write, Path.unlink)
        self._count = 0

    def path(self, vector: Vector) -> Path:
        """Of the vector's copy. Nobody changes the vector."""
        return self._files.of(vector)

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, vector: Vector) -> Path:
        self._count += 1
        path = self._folder / f"{self._count}.npy"
        np.save(path, vector, allow_pickle=False)
        return path


@lru_cache(maxsize=4)
def model_at(path: Path) -> Vector:
    """The vector; what is written into it is not written into the file."""
    mapped: Vector = np.load(path, mmap_mode="c", allow_pickle=False)
    return np.asarray(mapped)
