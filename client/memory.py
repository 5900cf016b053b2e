"""What a device's uplink remembers from one update to the next, through crashes.

    memory/kept.safetensors                 counts
    memory/pending-UPDATE_ID.safetensors    counts once the server has taken that update

Pending is written before the update goes into the outbox. An applied update's memory takes the place of the
one that counted, then the outbox lets the update go; a rejected one's is dropped. A crash in between
repeats the step: the update is sent again, the server gives the same answer. Another run, or another
model, starts with nothing.

Where a result is encoded while earlier ones wait to be sent, it goes on from what the newest of these left
out: updates are answered in the order in which they were encoded. If an earlier one is then rejected, what
it had taken over from the memory before is lost with it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from anabranch.client.records import SUFFIX, UNFINISHED, Record, read_record, write_record
from anabranch.compress.feedback import Memory
from anabranch.core.ids import checked_id
from anabranch.identity.files import sync_folder

KEPT, PENDING = f"kept{SUFFIX}", "pending-"


class Memories:
    """The memories of one device. `outbox` names the updates that wait to be sent: others' are removed."""

    def __init__(self, folder: Path, outbox: Collection[str] = ()) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # results leave in another thread than the one that makes them
        for path in [*folder.glob(f"{PENDING}*{SUFFIX}"), *folder.glob(f"*{UNFINISHED}")]:
            if path.stem.removeprefix(PENDING) not in outbox or path.suffix == UNFINISHED:
                path.unlink()

    def load(self, run_id: str, layout_hash: str, waiting: Sequence[str] = ()) -> Memory | None:
        """The memory that counts in this run of this model; None: nothing is remembered.

        `waiting`: the updates that are not answered yet, oldest first.
        """
        with self._lock:
            pending = [path for path in map(self._pending, reversed(waiting)) if path.exists()]
            record = read_record(pending[0] if pending else self._folder / KEPT)
        if record is None or (record.facts["run_id"], record.facts["layout_hash"]) != (run_id, layout_hash):
            return None
        facts = record.facts
        residual = record.arrays["residual"].astype(np.float32, copy=False)
        return Memory(residual, int(facts["base_version"]), float(facts["length_mean"]), dict(facts["notes"]))

    def put(self, update_id: str, memory: Memory, run_id: str, layout_hash: str) -> None:
        """Make a pending memory durable. Raises `StoreError`."""
        facts = {
            "run_id": run_id,
            "layout_hash": layout_hash,
            "base_version": memory.base_version,
            "length_mean": memory.length_mean,
            "notes": dict(memory.notes),
        }
        write_record(self._pending(update_id), Record({"residual": memory.residual}, facts), durable=True)

    def commit(self, update_id: str) -> None:
        """The server has taken the update. Harmless to repeat."""
        pending = self._pending(update_id)
        with self._lock:
            if pending.exists():
                pending.replace(self._folder / KEPT)
                sync_folder(self._folder)

    def drop(self, update_id: str) -> None:
        """The update does not count. Harmless to repeat."""
        self._pending(update_id).unlink(missing_ok=True)

    def forget(self) -> None:
        """Start with nothing: the training has diverged."""
        (self._folder / KEPT).unlink(missing_ok=True)

    def _pending(self, update_id: str) -> Path:
        return self._folder / f"{PENDING}{checked_id(update_id, 'update_id')}{SUFFIX}"
