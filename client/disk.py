"""What of a device outlives its process: its results, what its uplink remembers and what its App keeps.

Each has a folder of its own (`outbox.py`, `memory.py`, `kept.py`); here is in which order they are written,
so that a crash between any two of them does no harm.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from anabranch.client.kept import Keepsake, KeptState
from anabranch.client.memory import Memories
from anabranch.client.outbox import Outbox, OutboxBounds, UpdateEntry
from anabranch.client.state import KEPT, MEMORY, OUTBOX
from anabranch.compress.feedback import Memory
from anabranch.core.content import SHA256


class DeviceDisk:
    """What of a device outlives its process, written in an order that no crash between two writes harms.

    Another run (`run_id`), or another model, starts with nothing. Raises `StoreError`.
    """

    def __init__(self, state_dir: Path, bounds: OutboxBounds | None = None) -> None:
        self._outbox = Outbox(state_dir / OUTBOX, bounds)
        waiting = self._outbox.pending()
        self._memories = Memories(state_dir / MEMORY, waiting)
        self._kept = KeptState(state_dir / KEPT, waiting)
        self._run_id = self._layout_hash = ""

    def join(self, run_id: str, layout_hash: str) -> None:
        """What is written and read is this run's from now on."""
        self._run_id, self._layout_hash = run_id, layout_hash

    def waiting(self) -> list[str]:
        """The results that wait to be sent, oldest first."""
        return self._outbox.pending()

    def load(self, update_id: str) -> UpdateEntry:
        """A result. Raises `StoreCorrupt` when it is torn or not there."""
        return self._outbox.load(update_id)

    def renamed(self, entry: UpdateEntry) -> UpdateEntry:
        """A result in the place of itself, by its SHA-256, before it is sent so. Raises `StoreError`."""
        found = replace(entry, algorithm=SHA256)
        self._outbox.put(found)
        return found

    def has_room(self, entry: UpdateEntry) -> bool:
        """Whether it is within the outbox's bounds. Raises `TooLarge` when it never can be."""
        return self._outbox.has_room(entry)

    def memory(self) -> Memory | None:
        """What the uplink goes on from: what the newest result that waits has left out, or what counts."""
        return self._memories.load(self._run_id, self._layout_hash, self._outbox.pending())

    def kept(self) -> Keepsake:
        """What the App and the device keep."""
        return self._kept.load(self._run_id)

    def put(self, entry: UpdateEntry, memory: Memory | None, kept: Keepsake) -> None:
        """Make a result durable, what its uplink remembers with it, and what is kept from now on."""
        if memory is not None:
            self._memories.put(entry.update_id, memory, self._run_id, self._layout_hash)
        with self._kept.beside(entry.update_id, kept, self._run_id):
            self._outbox.put(entry)

    def commit(self, update_id: str) -> None:
        """The server has taken a result: its memory counts. Harmless to repeat."""
        self._memories.commit(update_id)

    def discard(self, update_id: str) -> None:
        """A result is over, and its memory too unless that counts. Harmless to repeat."""
        self._memories.drop(update_id)
        self._outbox.remove(update_id)

    def forget(self) -> None:
        """The uplink remembers nothing."""
        self._memories.forget()
