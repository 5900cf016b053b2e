"""How far a server's data was proved by `verify`, so that the next one goes on from there.

    proved/record.json                       the last proved event, the hash of the log up to it, and when
    proved/snapshots/<sha256>.safetensors    the state that the log replays to up to that event

That the log is still the one that was proved is looked at every time: it is hashed, which takes a small part
of what a replay takes. Payloads that were proved are not read again; `verify --whole` does.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from anabranch.core.engine.engine import Engine
from anabranch.core.errors import ConfigError, StoreError
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.snapshot import Snapshot, state_digest, take_snapshot
from anabranch.identity.files import check_owner, write_private
from anabranch.server.history import gone_on, history_at
from anabranch.server.store.base import Recovery, RunInfo, Store
from anabranch.server.store.mark import FILE as MARK
from anabranch.server.store.snapshots import SnapshotFiles

log = logging.getLogger(__name__)

FOLDER, RECORD = "proved", "record.json"


@dataclass(frozen=True)
class _Record:
    """Up to which event; the hash of the log up to it (`History.mark`), and of the state; whose signatures.

    `at`: when, in seconds since 1970. `snapshot`: the SHA-256 of the file that has the state.
    """

    run_id: str
    seq: int
    mark: str
    state_sha256: str
    ca_sha256: str
    at: float
    snapshot: str


@dataclass(frozen=True)
class ProvedState:
    """The state that a log replays to up to an event, proved at a time."""

    seq: int
    at: float
    snapshot: Snapshot


class Proofbook:
    """The record of one data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FOLDER / RECORD
        self._files = SnapshotFiles(data_dir / FOLDER, DEFAULT_LIMITS)

    def read(self, store: Store, info: RunInfo, ca_sha256: str, first: Recovery) -> ProvedState | None:
        """What holds of this log still; None where nothing was proved, or not what is asked for.

        `first`: where the log begins. It is read up to where it was proved, and its hash is what it was.
        """
        try:
            found = _Record(**json.loads(self._path.read_bytes()))
            asked = not ca_sha256 or found.ca_sha256 == ca_sha256
            if not asked or found.run_id != info.run_id or found.seq < first.applied_through_seq:
                return None
            if _mark(store, info, first, found.seq) != found.mark:
                return None
            return ProvedState(found.seq, found.at, self._files.read(found.snapshot))
        except (OSError, ValueError, TypeError, StoreError):
            return None

    def note(self, info: RunInfo, seq: int, mark: str, engine: Engine, ca_sha256: str) -> None:
        """All up to an event was proved. Where nothing can be written the next proof is a longer one.

        So it is where a snapshot names what lies on a shelf: that of the server goes on meanwhile.
        """
        try:
            self._write(info, seq, mark, engine, ca_sha256)
        except (StoreError, ConfigError) as error:
            log.warning("how far the data were proved is not noted: %s", error)

    def _write(self, info: RunInfo, seq: int, mark: str, engine: Engine, ca_sha256: str) -> None:
        taken = take_snapshot(engine, copy=False)
        if taken.holds:
            return
        check_owner(self._path.parent.parent / MARK)
        self._files.prepare()
        snapshot = self._files.write(taken)
        named = (mark, state_digest(engine), ca_sha256, time.time(), snapshot)
        write_private(self._path, json.dumps(asdict(_Record(info.run_id, seq, *named)), indent=1).encode())
        self._files.remove_all_but({snapshot})


def _mark(store: Store, info: RunInfo, first: Recovery, seq: int) -> str:
    """The hash of a log up to an event."""
    version = 0 if first.snapshot is None else first.snapshot.meta["version"]
    history = history_at(store, info, version, first.applied_through_seq)
    return gone_on(history, store, first.applied_through_seq, seq).mark(seq).head
