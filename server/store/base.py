"""What a store promises. Memory, SQLite and PostgreSQL pass one suite (tests/conformance/test_stores.py).

The event log is the truth: the model is a fold over it. Leases, receipts and versions in the other
tables are projections of it, written with the *next* append, and written again from the log after
a crash.

Laws:

1. When `append` returns, its entries survive a kill, an OS crash and a power cut. It is one
   transaction: all or none. Sequence numbers grow by one, from 1.
2. An update counts once: `append` of an update whose `update_id` is in the log raises nothing, and
   gives the sequence number None for that entry; it is not written again.
3. A snapshot names the last event that it has folded, `applied_through_seq`, in one transaction.
4. `load` gives the newest snapshot whose bytes have their digest, older ones otherwise, and every
   event after it, in order. A payload whose digest differs raises `StoreCorrupt`.
5. A full disk raises `StoreFull` and leaves the log as it was. A database that lets nobody in raises
   `StoreUnreachable` where one more connection is needed, for a large payload or a snapshot, and nothing of
   that is written. Whatever else goes wrong with a write raises `DiskFailed`: nobody can know what is on the
   disk, so the process must end (abort, never try again) and recover.

6. What `acknowledge` was told is kept apart from the log, so that the log cannot lose it as well. A log that
   ends before it, or before a snapshot, raises `LogLost` at `start` and `load`, and is left as it is. Where
   only a replay tells (a snapshot that no row names), the first `acknowledge` after it does.
7. A log need not begin with its first event (`trim`); then it begins with a snapshot (`first`). What goes by
   that is behind the newest two snapshots, and never counts as missing.
8. Where servers share a store, one leads. What any other tries to write raises `LeadershipLost`, and nothing
   of it is stored, whatever that server was told before.

Until `start`, a store only reads, and takes no lock: enough for `verify`. A store is used by one
thread at a time, the writer's; its `blobs` and `write_snapshot` by any.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from anabranch.core.content import SHA256
from anabranch.core.effects import Effect
from anabranch.core.errors import StoreError, StoreFull, StoreLocked, StoreUnreachable
from anabranch.core.events import Payload
from anabranch.core.journal import Record, line
from anabranch.core.model.updates import Receipt
from anabranch.core.retention import ALL, Keep
from anabranch.core.snapshot import Snapshot
from anabranch.host.chain import ChainLink as ChainLink
from anabranch.host.chain import Mark as Mark
from anabranch.host.log import Log
from anabranch.host.log import Recovery as Recovery

NOT_NOW = (StoreFull, StoreUnreachable)  # nothing of it was written: later again


class DiskFailed(StoreError):
    """A write or an fsync failed other than for want of space: end the process, then recover."""


class LedByAnother(StoreLocked):
    """Another server leads this run. It is worth waiting for its end.

    `leads`: which one, for whoever waits; the message is for whoever does not.
    """

    def __init__(self, owner: str) -> None:
        self.leads = f"{owner} leads this run"
        super().__init__(
            f"another process writes there: {self.leads}; stop it, use another database, or wait for it "
            "with --standby"
        )


@dataclass(frozen=True)
class RunInfo:
    """One run, fixed at its start. `config` is `Config.to_json()`, `layout` is `ParamSpec.to_json()`."""

    run_id: str
    name: str
    config: Mapping[str, Any]
    layout: list[Any] | dict[str, Any]
    initial_sha256: str
    created_at: float


@dataclass(frozen=True)
class Entry:
    """An event to append. `inline` has the payload of a small update; a large one is a blob already.

    The line is made once, for the log and for the chain of versions: the record is not written to any more.
    """

    record: Record
    inline: bytes | None = None

    @cached_property
    def line(self) -> str:
        """The record's canonical line."""
        return line(self.record)

    @classmethod
    def of_line(cls, text: str) -> Entry:
        """An entry that is in the log already, without its payload. Raises `ValueError`."""
        made = cls(json.loads(text))
        made.__dict__["line"] = text
        return made


@dataclass(frozen=True)
class Projection:
    """What came of a logged event: written beside the log for look-ups and audits."""

    seq: int
    now: float
    effects: Sequence[Effect]
    # SHA-256 (hex) of versions, where they were computed.
    digests: Mapping[int, str] = field(default_factory=dict)
    # Of every version that was published.
    links: Mapping[int, ChainLink] = field(default_factory=dict)


@dataclass(frozen=True)
class VersionRow:
    """A published version. `sha256` is of the little-endian vector; None where nobody asked for it.

    `seq` is the event that published it. `link` and `head`: see `ChainLink`; None for versions of before
    there were any.
    """

    version: int
    sha256: str | None
    updates: int
    published_at: float
    snapshot: bool
    metrics: Mapping[str, float]
    seq: int
    link: str | None = None
    head: str | None = None


class Blobs(Protocol):
    """Uploads on their way, and the large payloads. Safe to use from several threads.

    An `update_id` here is the name of an upload, of one id or up to three with a + between. It and digests
    become file names, so each is checked: `InvalidUpdate` if it is malformed.
    """

    def received(self, update_id: str) -> int:
        """Bytes of an upload that are here and durable: where to go on."""
        ...

    def write(self, update_id: str, offset: int, chunk: bytes | memoryview, algorithm: str = SHA256) -> int:
        """Put a chunk at `offset`, dropping what lies after it; returns where the next one goes.

        Behind the beginning of what was sealed it may be passed over: those bytes are here. `algorithm`: of
        the digest that `seal` will be given, which may grow with the chunks. Raises `Unavailable` if it
        would leave a gap, `StoreFull`.
        """
        ...

    def seal(self, update_id: str, digest: str) -> bytes | memoryview:
        """The bytes of a whole upload, without a copy, fixed from now on: decode and check them.

        Then `adopt` them, or keep them elsewhere (inline) and `discard`. May be repeated. Raises
        `InvalidUpdate`, and forgets the upload, if the digest is another; `Unavailable` if it is not here.
        """
        ...

    def adopt(self, update_id: str, digest: str) -> None:
        """Make a sealed upload a durable blob: before its entry is appended. May be repeated."""
        ...

    def cool(self, digest: str) -> None:
        """Nobody will read a blob soon: what is kept of it beside its bytes may go. Raises nothing."""
        ...

    def discard(self, update_id: str) -> None:
        """Forget an upload, if it is there."""
        ...

    def spooled(self) -> dict[str, int]:
        """What is left of uploads, by name: bytes."""
        ...

    def spooled_bytes(self, update_id: str) -> int:
        """How much there is of an upload, durable or not."""
        ...


class Store(Log, Protocol):
    """Where a server keeps log, payloads and snapshots. The module has the laws.

    A class of one has `of(database, data_dir, limits, lease_s)` as well: the store of `server.database`,
    which names it, for a server whose other files are in `data_dir`; see `server.leader_lease_s`.
    """

    @property
    def blobs(self) -> Blobs:
        """Where uploads and large payloads lie."""
        ...

    @property
    def lease_s(self) -> float:
        """After how long without `renew` another server may take over; 0: no other can."""
        ...

    def info(self) -> RunInfo | None:
        """The run that is stored, if there is one. Raises `StoreNewer`."""
        ...

    def start(self, info: RunInfo) -> RunInfo:
        """Enter a new run, or find the one that is there: returns the stored info.

        Raises `StoreNewer`, `StoreLocked`, `LedByAnother`, `StoreCorrupt`, `LogLost`, `ManifestMismatch` if
        the layout or the initial weights differ from the stored run's.
        """
        ...

    def renew(self) -> None:
        """Stay the leader for another `lease_s`. From any thread. Raises `LeadershipLost`, `StoreError`."""
        ...

    def abandon(self) -> None:
        """From any thread: let go of the database; whoever waits for it gets an error."""
        ...

    def append(self, entries: Sequence[Entry], projections: Sequence[Projection] = ()) -> list[int | None]:
        """Make events durable, and write the projections of earlier ones. Raises `StoreFull`."""
        ...

    def mark(self) -> Mark | None:
        """What `acknowledge` was told last, if anything. Raises `StoreCorrupt`."""
        ...

    def acknowledge(self, mark: Mark) -> None:
        """Remember, durably, that the log has come so far: before anybody hears it. Raises `DiskFailed`.

        All that `load` gave, and what came of it, has been appended before the first.
        """
        ...

    def disown(self) -> None:
        """Forget what `acknowledge` was told: an operator has said that the run goes on from where it is."""
        ...

    def payload(self, reference: Payload) -> bytes | memoryview:
        """The bytes of an update. Raises `StoreCorrupt`."""
        ...

    def receipt(self, update_id: str) -> Receipt | None:
        """What was decided of an update, from the projections."""
        ...

    def write_snapshot(self, snapshot: Snapshot) -> str:
        """Make what is not in rows durable: a file that counts for nothing until `save_snapshot` names it.

        Until then, or until another is written, it stays: no `retain` may take it for one that is superseded.

        Returns its SHA-256. From any thread, one at a time. Raises `StoreFull`.
        """
        ...

    def save_snapshot(
        self, snapshot: Snapshot, applied_through_seq: int, at: float, keep: Keep = ALL, written: str = ""
    ) -> None:
        """Write a snapshot durably; keeps the newest three, and those that `keep` needs. Raises `StoreFull`.

        `written`: what `write_snapshot` has given for it; without that it is called.

        Where it has `rows`, those that changed since the snapshot before, they are written with it; `load`
        gives back all of them.

        The projections of all it has folded must have been appended before (`append((), rest)`):
        after a crash the log is read from here on, so nobody would write them again.
        """
        ...

    def retain(self, keep: Keep) -> None:
        """Of the snapshots that are there keep those of `save_snapshot`: the log may begin with one of them.

        For a server that is started with another `keep`: one that holds too much comes to no snapshot.
        """
        ...

    def trim(self, events_max: int) -> int:
        """Drop so many of the oldest events that the last `keep` that was given does not ask for.

        Returns how many were dropped: call it again while there are any. Raises `StoreFull`.
        """
        ...

    def load(self) -> Recovery:
        """The newest good snapshot and the events after it.

        Raises `StoreCorrupt` where none is good and the log does not begin with its first event.
        """
        ...

    def first(self) -> Recovery:
        """Where the log begins: no snapshot, or the oldest good one, and the events after it."""
        ...

    def records(self, after: int = 0) -> Iterator[tuple[int, Record]]:
        """The log after an event: all that is kept of it unless told otherwise."""
        ...

    def versions(self, after: int = 0, limit: int = 1000) -> list[VersionRow]:
        """Published versions above `after`, in order."""
        ...

    def links(self, after: int, limit: int) -> list[str]:
        """Links (hex) of the versions above `after`, in order, up to the first that has none.

        Those of versions that are in the log no more as well.
        """
        ...

    def metrics(self, version: int) -> Mapping[str, float]:
        """What was reported of a version, whether the log still has it or not."""
        ...

    def add_metrics(self, version: int, metrics: Mapping[str, float], at: float) -> None:
        """Metrics of a version; a later value of a name replaces the earlier."""
        ...

    def tags(self) -> dict[str, tuple[str, ...]]:
        """The operators' notes on clients, by which they are found again: those that have any, in order."""
        ...

    def tag(self, client_ids: Sequence[str], add: Sequence[str], remove: Sequence[str]) -> None:
        """Give clients notes, and take others away. They are no events: nothing is decided by them."""
        ...

    def problems(self, after: int = 0) -> list[str]:
        """Every broken invariant of the stored data, in words. Reads only.

        Payloads are looked at from after this event on.
        """
        ...

    def close(self) -> None:
        """Flush and let go of files and locks."""
        ...
