"""Python's search for circles of objects while a simulation runs.

A large fleet is millions of objects that stay, and to look through all of them takes seconds. What an App
leaves in circles is young: the searches among young objects, which find that, are begun as often as ever.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARER = 10  # times


@contextmanager
def rarely_all() -> Iterator[None]:
    """Look through all objects a tenth as often meanwhile."""
    before = gc.get_threshold()
    young, middle, old = before
    gc.set_threshold(young, middle, RARER * old)
    try:
        yield
    finally:
        gc.set_threshold(*before)
