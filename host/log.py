"""The log of a run, wherever it lies: one way to write it, and one to read it.

Its adapters are the server's stores, the simulated disk, Flower's logbook, and the folder of a run.
Events have their places, which count from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from anabranch.core import events as ev
from anabranch.core.journal import Record
from anabranch.core.snapshot import Snapshot

Data = bytes | memoryview
Numbered = Iterator[tuple[int, Record]]


@dataclass(frozen=True)
class Recovery:
    """Where to go on. `tail` yields (seq, record) for every event after the snapshot.

    `taken_at`: the snapshot's time, which is no earlier than that of the last event that it has folded.
    `mended`: something small of it was lost where it lies, so the next snapshot is to rest on nothing of it.
    """

    snapshot: Snapshot | None
    applied_through_seq: int
    tail: Numbered
    taken_at: float = 0.0
    mended: bool = False


class Journal(Protocol):
    """Where an event goes before the engine acts on it. Who commits in batches has `Store.append`."""

    def append(self, record: Record, payload: Data | None = None) -> None:
        """Take one record, and the payload it refers to."""
        ...


class Log(Protocol):
    """What is read of a log."""

    def records(self, after: int = 0) -> Numbered:
        """The events after a place."""
        ...

    def payload(self, reference: ev.Payload) -> Data:
        """The bytes of an update. Raises `StoreCorrupt`."""
        ...

    def load(self) -> Recovery:
        """The newest state, and the events after it."""
        ...

    def first(self) -> Recovery:
        """Where the log begins: no snapshot, or the oldest, and the events after it."""
        ...


class WholeLog:
    """A log that begins with its first event, and has no snapshots: `read` gives it after a place."""

    def __init__(self, read: Callable[[int], Numbered], payload: Callable[[ev.Payload], Data]) -> None:
        self._read, self._payload = read, payload

    def records(self, after: int = 0) -> Numbered:
        """See `Log`."""
        return self._read(after)

    def payload(self, reference: ev.Payload) -> Data:
        """See `Log`."""
        return self._payload(reference)

    def load(self) -> Recovery:
        """See `Log`."""
        return Recovery(None, 0, self._read(0))

    first = load
