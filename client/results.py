"""What a device has trained, on its disk: the updates that wait to be sent, and what it remembers of them.

    outbox/     whole updates, until the server has answered (`outbox.py`)
    memory/     what the uplink's error feedback remembers (`memory.py`)
    kept/       what the App itself keeps from task to task (`App.kept`)

What the App keeps belongs to its newest result: it is written before that goes into the outbox, and counts
from then on, whatever the server says. A crash in between is settled at the next start: it counts if the
result is in the outbox. Another run starts with nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anabranch.client.memory import Memories
from anabranch.client.outbox import Outbox, UpdateEntry
from anabranch.client.records import SUFFIX, Record, read_record, sync_folder, write_record
from anabranch.compress.feedback import Memory


class Results:
    """See the module. The folder must be this process's own (`state.locked`)."""

    def __init__(self, state_dir: Path) -> None:
        self._outbox = Outbox(state_dir / "outbox")
        self._memories = Memories(state_dir / "memory", self._outbox.pending())
        self._kept, self._next = (state_dir / "kept" / f"{name}{SUFFIX}" for name in ("kept", "next"))
        self._settle()

    def waiting(self) -> list[str]:
        """The updates that are not answered yet, oldest first."""
        return self._outbox.pending()

    def memory(self, run_id: str, layout_hash: str) -> Memory | None:
        """What the uplink remembers in this run of this model."""
        return self._memories.load(run_id, layout_hash, self._outbox.pending())

    def kept(self, run_id: str) -> bytes:
        """What the App has kept in this run; b"" at first."""
        record = read_record(self._kept)
        if record is None or record.facts["run_id"] != run_id:
            return b""
        return record.arrays["kept"].tobytes()

    def put(self, entry: UpdateEntry, pending: Memory | None, kept: bytes, run_id: str) -> None:
        """Make a result durable, and what is remembered with it. Raises `StoreError`."""
        if pending is not None:
            self._memories.put(entry.update_id, pending, run_id, entry.manifest_sha256)
        keeps = bool(kept) or self._kept.exists()
        if keeps:
            facts = {"run_id": run_id, "update_id": entry.update_id}
            write_record(self._next, Record({"kept": np.frombuffer(kept, np.uint8)}, facts), durable=True)
        self._outbox.put(entry)
        if keeps:
            self._count_next()

    def load(self, update_id: str) -> UpdateEntry:
        """An update that waits to be sent."""
        return self._outbox.load(update_id)

    def taken(self, update_id: str) -> None:
        """The server has used the update: its uplink's memory counts."""
        self._memories.commit(update_id)

    def discard(self, update_id: str) -> None:
        """The server has answered."""
        self._memories.drop(update_id)  # unless it was committed
        self._outbox.remove(update_id)

    def forget(self) -> None:
        """The training has diverged: what the uplink remembers is of no use either."""
        self._memories.forget()

    def _settle(self) -> None:
        record = read_record(self._next)
        if record is not None and record.facts["update_id"] in self._outbox.pending():
            self._count_next()
        self._next.unlink(missing_ok=True)

    def _count_next(self) -> None:
        self._next.replace(self._kept)
        sync_folder(self._kept.parent)
