"""What the App on a device keeps from task to task (`App.kept`), through crashes.

    kept/kept.safetensors    counts
    kept/next.safetensors    counts once the result that it belongs to is in the outbox

It is written before that result goes into the outbox, and counts from then on, whatever the server says. A
crash in between is settled at the next start: it counts if the result is there. Another run starts with
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from anabranch.client.records import SUFFIX, Record, read_record, sync_folder, write_record


class Kept:
    """See the module. `outbox` names the updates that wait to be sent."""

    def __init__(self, folder: Path, outbox: Collection[str] = ()) -> None:
        self._kept, self._next = (folder / f"{name}{SUFFIX}" for name in ("kept", "next"))
        record = read_record(self._next)
        if record is not None and record.facts["update_id"] in outbox:
            self._count_next()
        self._next.unlink(missing_ok=True)

    def load(self, run_id: str) -> bytes:
        """What counts in this run; b"" at first."""
        record = read_record(self._kept)
        if record is None or record.facts["run_id"] != run_id:
            return b""
        return record.arrays["kept"].tobytes()

    @contextmanager
    def beside(self, update_id: str, kept: bytes, run_id: str) -> Iterator[None]:
        """Inside, the update goes into the outbox; afterwards `kept` counts. Raises `StoreError`."""
        keeps = bool(kept) or self._kept.exists()
        if keeps:
            facts = {"run_id": run_id, "update_id": update_id}
            write_record(self._next, Record({"kept": np.frombuffer(kept, np.uint8)}, facts), durable=True)
        yield
        if keeps:
            self._count_next()

    def _count_next(self) -> None:
        self._next.replace(self._kept)
        sync_folder(self._kept.parent)
