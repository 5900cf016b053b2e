"""Models that worker processes of this machine train from: each is written once, and read by all of them.

A file that a worker maps is in memory once, however many read it; a queue would copy it for each task.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

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
    """The files of the newest vectors, by the array that they are copies of, and of those that are in use.

    They lie where Python puts temporary files (`TMPDIR`).
    """

    def __init__(self, kept_max: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="anabranch-models-"))
        self._old: list[Path] = []
        self._files = Newest(kept_max, self._write, self._old.append)
        self._readers: list[tuple[Path, Future[Any]]] = []
        self._count = 0

    def lend(self, vector: Vector, begin: Callable[[Path], Future[T]]) -> Future[T]:
        """What is begun with the path of the vector's copy, which is there until that is done.

        Nobody changes the vector. A reader that has been slow may be at its first model while others have had
        any number of newer ones.
        """
        path = self._files.of(vector)
        self._readers = [(read, reader) for read, reader in self._readers if not reader.done()]
        in_use = {path, *(read for read, _ in self._readers)}
        for old in [old for old in self._old if old not in in_use]:
            self._old.remove(old)
            old.unlink()
        future = begin(path)
        self._readers.append((path, future))
        return future

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
