"""Python's search for circles of objects, while a simulation of a large fleet runs.

A fleet is millions of objects that stay, and each search of all there are looks through them anew.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def passed_over() -> Iterator[None]:
    """What is there now is passed over meanwhile; what is made from now on is searched as ever.

    What is in circles already goes before. Nothing changes where somebody else has frozen something: nobody
    could tell whose is whose afterwards.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
