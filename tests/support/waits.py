"""Waiting for something that comes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(look: Callable[[], T], good: Callable[[T], object] = bool) -> T:
    """Look again until what is seen is good, and return it; the test's own time limit ends it."""
    while not good(found := look()):
        time.sleep(0.005)
    return found
