"""What a part comes to in another process, as that of a server which is started again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from typing import Any

import pytest

SEED = "PYTHONHASHSEED"


@cache
def _process() -> ProcessPoolExecutor:
    """One for all tests, in which texts have other hashes, and a set of them another order."""
    pool, before = ProcessPoolExecutor(1, get_context("spawn")), os.environ.get(SEED)
    os.environ[SEED] = "1" if before != "1" else "2"
    try:
        pool.submit(os.getpid).result()
    finally:
        os.environ.pop(SEED)
        if before is not None:
            os.environ[SEED] = before
    return pool


def came_to(what: Callable[[Any], Any], part: Any) -> Any:
    """`what(part)` of another process. Skips the test where the part cannot be had there."""
    _process().submit(_find_modules, sys.path).result()
    if error := _process().submit(type, part).exception():
        if isinstance(error, BrokenProcessPool):
            _process.cache_clear()
        pytest.skip(f"no other process can have this {type(part).__name__}: {error}")
    return _process().submit(what, part).result()


def _find_modules(path: list[str]) -> None:
    sys.path[:] = path
