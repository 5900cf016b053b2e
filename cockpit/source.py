"""What the cockpit is told of a run by: a folder, or whoever else can say how it stands and what happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from anabranch.core.config.flower import SCHEME
from anabranch.core.config.goal import Goal
from anabranch.reports.picture.picture import Picture
from anabranch.reports.result import Kind

State = Literal["running", "finished", "interrupted", "paused"]


@dataclass(frozen=True)
class Head:
    """What a run is, and how it stands by what its source says; `why` it has ended.

    `updates`, `version` and `best` are of a run whose records nobody has read yet; None: they alone tell it.
    `silence_s`: a device that says nothing for so long is offline; None: that cannot be told.
    """

    name: str
    strategy: str
    workload: str
    kind: Kind
    seed: int
    state: State
    config: Mapping[str, Any]
    why: str = ""
    given_up: bool = False  # it has ended because nothing came of it
    started_at: float | None = None
    updates: int | None = None
    version: int | None = None
    goal: Goal = field(default_factory=Goal)
    best: float | None = None
    uptime_s: float | None = None
    silence_s: float | None = None
    online: int | None = None
    clients: int = 0
    figures: Mapping[str, Any] = field(default_factory=dict)  # what only a server has to say of itself

    @property
    def framework(self) -> str | None:
        """Whose app it runs, where that is none of ours: live or simulated it may be all the same."""
        return "Flower" if self.workload.startswith(SCHEME) else None


class TakenBack(Exception):
    """What was told of a run is no longer so: its server's data were put back. All is to be told anew."""


class Orders(Protocol):
    """What an operator may have done to a run. Raises errors of the tree."""

    def pause(self) -> None:
        """Hand out no more tasks."""

    def resume(self) -> None:
        """Hand out tasks again."""

    def quarantine(self, client: str, why: str) -> None:
        """No task for a device, and no update of it."""

    def release(self, client: str) -> bool:
        """Let a device out of quarantine; whether it was in."""
        ...

    def rollback(self, to_version: int, without: Sequence[str], everyone: bool) -> tuple[int, int]:
        """The version that comes of it, and how many updates were left out."""
        ...

    def set_settings(self, values: Mapping[str, Any]) -> Sequence[str]:
        """Change settings; what was changed, in words."""
        ...


class Source(Protocol):
    """One run, as somebody tells of it."""

    @property
    def name(self) -> str:
        """By which it is asked for, and which no other of those that are shown has."""
        ...

    @property
    def operator(self) -> str:
        """Whose papers it speaks with; empty for nobody's."""
        ...

    @property
    def orders(self) -> Orders | None:
        """What may be ordered, of a run that a server serves now; None where files tell of it."""
        ...

    def head(self) -> Head:
        """How the run stands. Raises errors of the tree."""
        ...

    def changed(self) -> None:
        """Somebody gave it an order: what `head` said before is no longer so."""

    def follow(self, picture: Picture, stop: threading.Event, caught_up: Callable[[], None]) -> None:
        """Tell the picture all there is, call `caught_up`, and go on until the run is over or `stop`.

        Raises `TakenBack`.
        """

    def server(self, picture: Picture) -> dict[str, Any] | None:
        """How the server fares; None where there is none."""

    def export(self, version: int | None) -> AbstractContextManager[Path]:
        """A version (None: the newest) as a safetensors file, there while inside. Raises `UnknownVersion`."""
        ...


Listing = Callable[[], Iterator[Source]]  # the runs that there are now
