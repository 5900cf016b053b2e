"""What a device keeps from task to task, through crashes: the App's (`App.kept`), and buffers of its own.

    kept/kept.safetensors    counts
    kept/next.safetensors    counts once the result that it belongs to is in the outbox

It is written before that result goes into the outbox, and counts from then on, whatever the server says. A
crash in between is settled at the next start: it counts if the result is there. Another run starts with
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anabranch.client.records import SUFFIX, Record, read_record, write_record
from anabranch.identity.files import sync_folder

APP, BUFFERS = "kept", "buffers"


@dataclass(frozen=True)
class Keepsake:
    """Bytes. `app`: the App's; `buffers`: the device's own, where `[model] buffers` is local."""

    app: bytes = b""
    buffers: bytes = b""


def keepsake_in(folder: Path, run_id: str | None = None) -> Keepsake:
    """What counts in a device's folder, in this run or in any; nothing at first. Only read."""
    record = read_record(folder / f"kept{SUFFIX}")
    if record is None or run_id not in (None, record.facts["run_id"]):
        return Keepsake()
    found = {name: array.tobytes() for name, array in record.arrays.items()}
    return Keepsake(found[APP], found.get(BUFFERS, b""))


class KeptState:
    """What a device keeps from task to task; what a result brings counts once that is in the outbox.

    `outbox` names the updates that wait to be sent.
    """

    def __init__(self, folder: Path, outbox: Collection[str] = ()) -> None:
        self._kept, self._next = (folder / f"{name}{SUFFIX}" for name in ("kept", "next"))
        record = read_record(self._next)
        if record is not None and record.facts["update_id"] in outbox:
            self._count_next()
        self._next.unlink(missing_ok=True)

    def load(self, run_id: str) -> Keepsake:
        """What counts in this run; nothing at first."""
        return keepsake_in(self._kept.parent, run_id)

    @contextmanager
    def beside(self, update_id: str, kept: Keepsake, run_id: str) -> Iterator[None]:
        """Inside, the update goes into the outbox; afterwards `kept` counts. Raises `StoreError`."""
        keeps = kept != Keepsake() or self._kept.exists()
        if keeps:
            facts = {"run_id": run_id, "update_id": update_id}
            arrays = {APP: np.frombuffer(kept.app, np.uint8)}
            if kept.buffers:
                arrays[BUFFERS] = np.frombuffer(kept.buffers, np.uint8)
            write_record(self._next, Record(arrays, facts), durable=True)
        yield
        if keeps:
            self._count_next()

    def _count_next(self) -> None:
        self._next.replace(self._kept)
        sync_folder(self._kept.parent)
