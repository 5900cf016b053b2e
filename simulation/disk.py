"""What a simulated server has on its disk: its newest snapshot, the log since, and the mark.

The log is bytes. A record is written with its payload, a length and a digest, so that a write that was cut
off is found: it is removed at the next start, as nobody has heard of it. A log that ends before the mark has
lost what somebody has heard of. That is `LogLost`, and nothing goes on from it until an operator says so
(`attest`), or puts a backup back.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from anabranch.core.engine.engine import Engine
from anabranch.core.errors import LogLost, ReplayMismatch, StoreCorrupt, StoreFull
from anabranch.core.events import Payload
from anabranch.core.journal import Record, line
from anabranch.core.snapshot import Snapshot, state_digest, take_snapshot
from anabranch.host.build import Begin
from anabranch.host.chain import HashChain, Mark
from anabranch.host.journal import Replay
from anabranch.host.log import Numbered, Recovery
from anabranch.identity.heads import first_head
from anabranch.reports.journal_files import DigestJournal, JournalPosition, JournalWriter

DIGEST_BYTES = 8
HEADER = struct.Struct(f"<II{DIGEST_BYTES}s")
LOST_MAX = 8  # acknowledged events that a disk loses at a time


class PowerCut(Exception):
    """The machine died in the middle of a write."""


@dataclass(frozen=True)
class DiskSnapshot:
    """A snapshot, how far it goes, and the chain there. `snapshot` None: version 0."""

    snapshot: Snapshot | None
    chain: HashChain
    seq: int = 0
    applied: int = 0
    last_now: float = 0.0


@dataclass(frozen=True)
class Backup:
    """A copy of the whole disk. `state_sha256`: of the engine then. `turn`: how often it had gone back."""

    saved: DiskSnapshot
    log: bytes
    mark: Mark | None
    seq: int
    turn: int
    place: JournalPosition
    places: tuple[JournalPosition, ...]
    state_sha256: str


class Disk:
    """A simulated server's disk, in memory: it may fail, tear a write, and be put back from a backup.

    Every record is passed on to the run's journal as well.

    `make` makes an engine: of a snapshot, or of version 0. `every_updates`: how often a snapshot is taken.
    `takes_back`: it may lose what was acknowledged, or be a backup, so that versions need names.
    """

    def __init__(
        self,
        journal: JournalWriter | DigestJournal,
        make: Begin,
        every_updates: int,
        takes_back: bool = False,
    ) -> None:
        self._journal, self._make, self._every_updates = journal, make, every_updates
        self.takes_back = takes_back
        origin = first_head({"journal": journal.sha256})
        self._saved = DiskSnapshot(None, HashChain("", origin, origin))
        self._log = bytearray()
        self._places: list[JournalPosition] = []  # the journal's before each record of the log
        self._mark: Mark | None = None
        # The digest of the state that a start must come to: empty if it is not known, None: as it was left.
        self._expected: str | None = None
        self._chain = self._saved.chain.copy()
        self.seq = 0  # the last event in the log
        self.last_now = 0.0  # its time
        self.turn = 0  # how often the log has gone back
        self._backed_up: int | None = None  # the version of the oldest snapshot in the backups of this turn
        self.is_full = False
        self.tears_at: float | None = None  # the next write is cut off after this fraction of it

    # --- writing -----------------------------------------------------------------------------

    def append(self, record: Record, payload: bytes | memoryview | None = None) -> None:
        """Take one record, and the payload it refers to. Raises `StoreFull`: then nothing has changed."""
        if self.is_full:
            raise StoreFull("no space left on the simulated disk")
        written = _framed(record, b"" if payload is None else bytes(payload))
        if self.tears_at is not None:
            self._log += written[: int(self.tears_at * len(written))]
            self.tears_at = None
            raise PowerCut
        self._log += written
        self._places.append(self._journal.place())
        self._journal.append(record, payload)
        self._chain.add(record)
        self.seq, self.last_now = self.seq + 1, record["now"]

    def published(self, version: int) -> None:
        """The newest event has published a version."""
        self._chain.publish(version)

    def acknowledge(self) -> None:
        """Somebody is about to hear of all that is in the log."""
        self._mark = self._chain.mark(self.seq)

    def save_if_due(self, engine: Engine) -> None:
        """A snapshot, as JSON and arrays; the log before it is not needed any more."""
        if self.is_full or not 0 < self._every_updates <= engine.counters.applied - self._saved.applied:
            return
        snapshot = take_snapshot(engine)
        kept = Snapshot(json.loads(json.dumps(snapshot.meta)), snapshot.arrays, holds=snapshot.holds)
        self._saved = DiskSnapshot(kept, self._chain.copy(), self.seq, engine.counters.applied, self.last_now)
        self._log.clear()
        self._places.clear()

    def head_of(self, version: int) -> str:
        """A version's head, empty where it is not known any more."""
        return self._chain.head_of(version) or ""

    def oldest_version(self) -> int:
        """What a start comes to at least, whatever is lost or put back: no log is cut before its snapshot.

        A backup of before the disk went back is put back no more.
        """
        return self._saved.chain.version if self._backed_up is None else self._backed_up

    def fill(self, is_full: bool) -> None:
        """There is no room from now on, or there is again."""
        self.is_full = is_full

    # --- what goes wrong ---------------------------------------------------------------------

    def lose(self, fraction: float) -> None:
        """The newest writes were never on the disk, though it had said so."""
        ends = [0, *(written.end for written in _read(self._log))]
        newest = ends[-1 - LOST_MAX :]
        del self._log[newest[0] + int(fraction * (newest[-1] - newest[0])) :]

    def backup(self, engine: Engine) -> Backup:
        """A copy of all that is here. `engine`: the one whose log this is."""
        self._backed_up = self.oldest_version()
        return Backup(
            self._saved,
            bytes(self._log),
            self._mark,
            self.seq,
            self.turn,
            self._journal.place(),
            tuple(self._places),
            state_digest(engine),
        )

    def put_back(self, backup: Backup) -> None:
        """Be as the backup was."""
        self._saved, self._log, self._mark = backup.saved, bytearray(backup.log), backup.mark
        self._places = list(backup.places)
        self._go_back(backup.seq, backup.place, backup.state_sha256)

    def attest(self) -> None:
        """An operator's word: go on from where the log ends, without what is lost."""
        self._mark = None

    def _go_back(self, seq: int, place: JournalPosition, state_sha256: str = "") -> None:
        """The log ends at event `seq` now; `state_sha256` of the engine there, empty if it is not known."""
        self._journal.go_back(place)
        self.seq, self.turn, self._expected = seq, self.turn + 1, state_sha256
        self._backed_up = None

    # --- reading -----------------------------------------------------------------------------

    def rebuild(self, before: Engine) -> Engine:
        """The engine as it was: the snapshot, then the log.

        Raises `LogLost` where the log ends before the mark, or is another one there, and `ReplayMismatch` if
        the engine is not what it was, or what was backed up.
        """
        found = self._cut()
        end, mark = self._saved.seq + len(found), self._mark
        if mark is not None and (lost := mark.lost(end)):
            raise LogLost(f"the log ends at event {end}, {lost} before the one that was acknowledged last")
        if end < self.seq:
            self._go_back(end, self._places[len(found)])
            del self._places[len(found) :]
        engine = self._replayed(found)
        expected = state_digest(before) if self._expected is None else self._expected
        self._expected = None
        if expected and state_digest(engine) != expected:
            raise ReplayMismatch("the log came to another state than the server that wrote it had")
        return engine

    def _cut(self) -> list[LogEntry]:
        """What is whole; the rest of a write that was cut off goes."""
        found = list(_read(self._log))
        del self._log[found[-1].end if found else 0 :]
        return found

    def _replayed(self, found: list[LogEntry]) -> Engine:
        """The engine of what was found; the chain and the time go on from there."""
        saved, mark = self._saved, self._mark
        replay, self._chain = Replay(Tail(saved, found), self._make), saved.chain.copy()
        self.last_now = saved.last_now
        for seq, record, effects in replay:
            self._chain.follow(record, effects)
            self.last_now = record["now"]
            if mark is not None and mark.contradicts(self._chain, seq):
                raise LogLost(f"the log up to event {seq} is not what was acknowledged")
        return replay.engine


@dataclass(frozen=True)
class LogEntry:
    """One record of the log and its payload; `end`: where it ends, in bytes."""

    record: Record
    payload: bytes
    end: int


class Tail:
    """What a start finds on the disk: a snapshot, and the log since."""

    def __init__(self, saved: DiskSnapshot, found: Sequence[LogEntry]) -> None:
        self._saved, self._found = saved, found
        self._payloads = {w.record["payload"]["sha256"]: w.payload for w in found if "payload" in w.record}

    def records(self, after: int = 0) -> Numbered:
        """See `Log`: nothing of before the snapshot."""
        places = enumerate((written.record for written in self._found), self._saved.seq + 1)
        return ((seq, record) for seq, record in places if seq > after)

    def payload(self, reference: Payload) -> bytes:
        """See `Log`."""
        try:
            return self._payloads[reference.sha256]
        except KeyError:
            raise StoreCorrupt(f"payload {reference.sha256} is not on the simulated disk") from None

    def load(self) -> Recovery:
        """See `Log`."""
        saved = self._saved
        return Recovery(saved.snapshot, saved.seq, self.records(), saved.last_now)

    first = load


def _framed(record: Record, payload: bytes) -> bytes:
    """What is written of a record: two lengths and a digest, a line, the payload."""
    text = line(record).encode()
    digest = hashlib.blake2b(text + payload, digest_size=DIGEST_BYTES).digest()
    return HEADER.pack(len(text), len(payload), digest) + text + payload


def _read(log: bytes | bytearray) -> Iterator[LogEntry]:
    """What of a log is whole, up to the first that is not."""
    at = 0
    while at + HEADER.size <= len(log):
        text_bytes, payload_bytes, digest = HEADER.unpack_from(log, at)
        middle = at + HEADER.size + text_bytes
        end = middle + payload_bytes
        body = bytes(log[at + HEADER.size : end])
        if end > len(log) or hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() != digest:
            return
        yield LogEntry(json.loads(body[:text_bytes]), body[text_bytes:], end)
        at = end
