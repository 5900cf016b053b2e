"""Python's search for circles of objects, while a simulation of a large fleet runs.

A fleet is millions of objects that stay, and each full search looks through them anew: in a run of a million
devices they took a fifth of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from anabranch.support.heap import frozen_by_others, unfreeze


@contextmanager
def passed_over() -> Iterator[None]:
    """What is there now is passed over meanwhile, and so is what lives through a full search that was due.

    What is in circles already goes before. Of what an App leaves in circles later that stays to the end which
    it had in hand during such a search, and no more. Nothing changes where somebody else has frozen objects:
    nobody could tell whose is whose afterwards.
    """
    if frozen_by_others():
        yield
        return
    gc.collect()
    gc.freeze()
    settled = _Settled()
    gc.callbacks.append(settled)
    try:
        yield
    finally:
        gc.callbacks.remove(settled)
        unfreeze()


class _Settled:
    """Has what is left by a full search passed over from then on, if Python began it.

    Not if somebody asked for it: an App may do so in each training, with a model in hand.
    """

    def __init__(self) -> None:
        self._due = False

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._due = gc.get_count()[2] > gc.get_threshold()[2]
        elif self._due:
            gc.freeze()
