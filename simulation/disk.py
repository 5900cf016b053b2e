"""What a simulated server has on its disk: the log since its newest snapshot, and that snapshot."""

from __future__ import annotations

import json

from anabranch.core.engine import Engine
from anabranch.core.errors import ReplayMismatch
from anabranch.core.journal import Record, replay
from anabranch.core.snapshot import Snapshot, state_digest, take_snapshot
from anabranch.host.build import Begin
from anabranch.host.submission import loader
from anabranch.reports.journal_files import DigestJournal, JournalWriter


class Disk:
    """Keeps what a restart needs, besides passing every record on to the run's journal.

    `make` makes an engine: of a snapshot, or of version 0. `every_updates`: how often a snapshot is taken.
    """

    def __init__(self, journal: JournalWriter | DigestJournal, make: Begin, every_updates: int) -> None:
        self._journal, self._make, self._every_updates = journal, make, every_updates
        self._snapshot: Snapshot | None = None
        self._log: list[tuple[Record, bytes]] = []
        self._saved_updates = 0
        self.last_now = 0.0  # of the newest event

    def append(self, record: Record, payload: bytes | memoryview | None = None) -> None:
        """Take one record, and the payload it refers to."""
        self._log.append((record, b"" if payload is None else bytes(payload)))
        self._journal.append(record, payload)
        self.last_now = record["now"]

    def save_if_due(self, engine: Engine) -> None:
        """A snapshot, as JSON and arrays; the log before it is not needed any more."""
        if not 0 < self._every_updates <= engine.counters.applied - self._saved_updates:
            return
        snapshot = take_snapshot(engine)
        self._snapshot = Snapshot(json.loads(json.dumps(snapshot.meta)), snapshot.arrays)
        self._log.clear()
        self._saved_updates = engine.counters.applied

    def rebuild(self, before: Engine) -> Engine:
        """The engine as it was: the snapshot, then the log. Raises `ReplayMismatch` if it is another."""
        engine = self._make(self._snapshot)
        payloads = {record["payload"]["sha256"]: data for record, data in self._log if "payload" in record}
        load = loader(lambda payload: payloads[payload.sha256], engine.spec)
        for _ in replay(engine, (record for record, _ in self._log), load):
            pass
        if state_digest(engine) != state_digest(before):
            raise ReplayMismatch("the log came to another state than the server that wrote it had")
        return engine
