"""The long part of an update's step, done before its turn and in another thread: asks need not wait for it.

The driver asks `Engine.long_part` before the update is in the log, has `LongPart.make` run wherever it likes,
and gives what comes of it to `handle`, behind whatever was logged meanwhile. If that changed anything of
which the part was made, it is made again: so whether there was one changes no bit of a journal's outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.strategy import State


class BeforehandView(Protocol):
    """What the engine has on record."""

    version: int
    state: State
    settings: EngineSettings


@dataclass(frozen=True, eq=False)
class LongPart:
    """Of one update, as things stand. `make` reads arrays of the state and the model, and writes to none."""

    update_id: str
    version: int
    state: State
    settings: EngineSettings
    make: Callable[[], Any]

    def fits(self, update_id: str, books: BeforehandView) -> bool:
        """Whether it is this update's, and things stand as they did."""
        same = self.state is books.state and self.settings is books.settings
        return same and (self.update_id, self.version) == (update_id, books.version)


@dataclass(frozen=True, eq=False)
class Beforehand:
    """A long part and what was made of it."""

    part: LongPart
    made: Any
