"""The store that forgets: for tests and for trials. A kill loses everything, the rest of the laws hold."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

import numpy as np
from safetensors.numpy import load, save

from anabranch.core.content import SHA256, check_content
from anabranch.core.effects import Decided, Published
from anabranch.core.engine.shelf import rows_named
from anabranch.core.errors import InvalidUpdate, StoreCorrupt, StoreError, StoreFull, TooLarge, Unavailable
from anabranch.core.events import Payload
from anabranch.core.journal import Record, payload_of
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.arrays import plain_tensors
from anabranch.core.model.updates import Receipt
from anabranch.core.retention import ALL, Keep, SnapshotPoint, kept
from anabranch.core.snapshot import Snapshot
from anabranch.server.store.base import Entry, Mark, Projection, Recovery, RunInfo, VersionRow
from anabranch.server.store.blobs import check_bytes, check_digest, check_name, check_place
from anabranch.server.store.ledger_rows import (
    ClientReader,
    capability_text,
    receipt_text,
    record_text,
    span_of,
    whole,
)
from anabranch.server.store.rows import check_same_run, metric_rows, update_id_of
from anabranch.server.store.snapshots import META
from anabranch.support.shelf import MemoryRows, RowShelf

log = logging.getLogger(__name__)


class MemoryBlobs:
    """`Blobs` of base.py."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.payloads: dict[str, bytes] = {}
        self._parts: dict[str, bytearray] = {}
        self._lock = threading.Lock()

    def received(self, update_id: str) -> int:
        """Bytes of an upload that are here."""
        check_name(update_id, self.limits)
        return len(self._parts.get(update_id, b""))

    def write(self, update_id: str, offset: int, chunk: bytes | memoryview, algorithm: str = SHA256) -> int:
        """Put a chunk at `offset`, dropping what lies after it. Raises `Unavailable`, `TooLarge`."""
        del algorithm  # what is in memory is read once, at its end
        check_name(update_id, self.limits)
        with self._lock:
            part = self._parts.setdefault(update_id, bytearray())
            check_place(update_id, offset, len(part))
            if offset + len(chunk) > self.limits.payload_bytes_max:
                cap = self.limits.payload_bytes_max
                raise TooLarge(f"update {update_id!r} is over payload_bytes_max, {cap}")
            part[offset:] = chunk
            return len(part)

    def seal(self, update_id: str, digest: str) -> bytes:
        """The bytes of a whole upload, its digest checked. Raises `InvalidUpdate`, `Unavailable`."""
        check_name(update_id, self.limits)
        check_digest(digest)
        with self._lock:
            if update_id not in self._parts:
                raise Unavailable(f"update {update_id!r} is not here: query it, and send what is lacking")
            data = bytes(self._parts[update_id])
        try:
            check_bytes(update_id, data, digest)
        except InvalidUpdate:
            self.discard(update_id)
            raise
        return data

    def adopt(self, update_id: str, digest: str) -> None:
        """Keep a sealed upload as a payload. Raises `InvalidUpdate`, `Unavailable`."""
        if digest not in self.payloads:
            self.payloads[digest] = self.seal(update_id, digest)
        self.discard(update_id)

    def cool(self, digest: str) -> None:
        """There is nothing beside the bytes."""

    def discard(self, update_id: str) -> None:
        """Forget an upload, if it is there."""
        check_name(update_id, self.limits)
        self._parts.pop(update_id, None)

    def spooled(self) -> dict[str, int]:
        """What is left of uploads."""
        return {name: len(part) for name, part in dict(self._parts).items()}

    def spooled_bytes(self, update_id: str) -> int:
        """How much there is of an upload."""
        return self.received(update_id)


@dataclass
class _Kept:
    """A snapshot as the bytes of its file."""

    seq: int
    version: int
    sha256: str
    data: bytes
    at: float

    @property
    def is_whole(self) -> bool:
        return hashlib.sha256(self.data).hexdigest() == self.sha256


@dataclass
class _Rows:
    """Clients, each by the snapshots since which it has changed, and receipts, by number; as texts."""

    clients: dict[str, dict[int, tuple[str, str]]] = field(default_factory=dict)
    receipts: dict[int, str] = field(default_factory=dict)

    def write(self, snapshot: Snapshot, seq: int) -> None:
        if snapshot.rows is None:
            return
        for client_id in snapshot.rows.enrolled:
            self.clients.setdefault(client_id, {})
        for client_id, client in snapshot.rows.clients.items():
            texts = capability_text(client.capability), record_text(client)
            self.clients[client_id][seq] = texts
        last = span_of(snapshot)[2]
        first = last - len(snapshot.rows.receipts)
        for number, found in enumerate(snapshot.rows.receipts, first + 1):
            self.receipts[number] = receipt_text(*found)

    def read(self, snapshot: Snapshot, seq: int) -> Snapshot:
        if "rows" not in snapshot.meta:
            return snapshot
        count, first, last = span_of(snapshot)
        reader = ClientReader()
        clients = [
            (client_id, reader(*of[max(s for s in of if s <= seq)]))
            for client_id, of in islice(self.clients.items(), count)
        ]
        lines = [self.receipts[number] for number in range(first + 1, last + 1)]
        return whole(snapshot, clients, lines)


@dataclass
class _Books:
    """Everything that survives `close`."""

    info: RunInfo | None = None
    mark: Mark | None = None
    lines: list[str] = field(default_factory=list)  # of the events after the first `dropped`
    dropped: int = 0
    links: list[str] = field(default_factory=list)  # of the versions that were dropped
    updates: dict[str, Record] = field(default_factory=dict)
    receipts: dict[str, Receipt] = field(default_factory=dict)
    versions: dict[int, VersionRow] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    tags: dict[str, set[str]] = field(default_factory=dict)
    snapshots: list[_Kept] = field(default_factory=list)
    rows: _Rows = field(default_factory=_Rows)

    @property
    def last(self) -> int:
        return self.dropped + len(self.lines)


def _read(data: bytes) -> Snapshot:
    """The snapshot of a file's bytes."""
    arrays = {name: array.copy() for name, array in load(data).items()}
    meta = json.loads(arrays.pop(META).tobytes())
    return Snapshot(meta, arrays)


class MemoryStore:
    """`Store` of base.py. It is full at `events_max` (0: never)."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.blobs = MemoryBlobs(limits)
        self.shelf = RowShelf(MemoryRows())
        self.events_max = 0
        self.books = _Books()
        self._started = False
        self._begin = 0  # the event that the log may begin with
        self._written: dict[str, bytes] = {}  # a snapshot that is not named yet

    def info(self) -> RunInfo | None:
        """The run that is held, if there is one."""
        return self.books.info

    def start(self, info: RunInfo) -> RunInfo:
        """Enter a new run, or find the one that is there. Raises `ManifestMismatch`."""
        if self.books.info is None:
            self.books.info = info
        check_same_run(self.books.info, info, "the store")
        self._started = True
        whole = [found for found in self.books.snapshots if found.is_whole]
        self.shelf.begin({found.seq: set(rows_named(_read(found.data).meta)) for found in whole})
        return self.books.info

    @property
    def lease_s(self) -> float:
        """Nobody else has this memory."""
        return 0.0

    def renew(self) -> None:
        """Nobody else has this memory."""

    def abandon(self) -> None:
        """There is nothing to wait for."""

    def append(self, entries: Sequence[Entry], projections: Sequence[Projection] = ()) -> list[int | None]:
        """Take events, and note what came of earlier ones. Raises `StoreFull`."""
        books = self.books
        if not self._started:
            raise StoreError("the store is open for reading only: call start() before writing")
        if self.events_max and books.last + len(entries) > self.events_max:
            raise StoreFull(f"the store holds {self.events_max} events at most")
        for entry in entries:
            self._check_blob(entry)
        for projection in projections:
            self._project(projection)
        return [self._append(entry) for entry in entries]

    def _append(self, entry: Entry) -> int | None:
        update_id, books = update_id_of(entry), self.books
        if update_id is not None:
            if update_id in books.updates:
                return None
            books.updates[update_id] = entry.record
        if entry.inline is not None:
            self.blobs.payloads[entry.record["payload"]["sha256"]] = entry.inline
        books.lines.append(entry.line)
        return books.last

    def _check_blob(self, entry: Entry) -> None:
        if update_id_of(entry) is None or entry.inline is not None or entry.record["flaw"]:
            return
        if entry.record["payload"]["sha256"] not in self.blobs.payloads:
            raise StoreError(f"the payload of update {update_id_of(entry)!r} is no blob: adopt it first")

    def _project(self, projection: Projection) -> None:
        versions = self.books.versions
        for effect in projection.effects:
            match effect:
                case Decided(duplicate=False):
                    self.books.receipts.setdefault(effect.receipt.update_id, effect.receipt)
                case Published(version=v):
                    row = VersionRow(
                        v, None, len(effect.update_ids), projection.now, False, {}, projection.seq
                    )
                    if (link := projection.links.get(v)) is not None:
                        row = replace(row, link=link.link, head=link.head)
                    versions.setdefault(v, row)
        for v, sha256 in projection.digests.items():
            if v in versions and versions[v].sha256 is None:
                versions[v] = replace(versions[v], sha256=sha256)

    def mark(self) -> Mark | None:
        """What `acknowledge` was told last."""
        return self.books.mark

    def acknowledge(self, mark: Mark) -> None:
        """Remember it as long as all the rest."""
        self.books.mark = mark

    def disown(self) -> None:
        """Forget what `acknowledge` was told."""
        self.books.mark = None

    def payload(self, reference: Payload) -> bytes:
        """The bytes of an update. Raises `StoreCorrupt`."""
        data = self.blobs.payloads.get(reference.sha256)
        if data is None:
            raise StoreCorrupt(f"payload {reference.sha256} is missing")
        check_content(data, reference.sha256)
        return data

    def receipt(self, update_id: str) -> Receipt | None:
        """What was decided of an update."""
        return self.books.receipts.get(update_id)

    def write_snapshot(self, snapshot: Snapshot) -> str:
        """Keep a copy until it is named."""
        self.shelf.flush()
        meta = np.frombuffer(json.dumps(snapshot.meta).encode(), np.uint8)
        data = save({**plain_tensors(snapshot.arrays), META: meta})
        sha256 = hashlib.sha256(data).hexdigest()
        self._written = {sha256: data}
        return sha256

    def save_snapshot(
        self, snapshot: Snapshot, applied_through_seq: int, at: float, keep: Keep = ALL, written: str = ""
    ) -> None:
        """Keep a copy; keeps the newest three, and what `keep` needs."""
        sha256 = written or self.write_snapshot(snapshot)
        books, data = self.books, self._written.pop(sha256)
        found = [k for k in books.snapshots if k.seq != applied_through_seq]
        books.rows.write(snapshot, applied_through_seq)
        found.append(_Kept(applied_through_seq, snapshot.meta["version"], sha256, data, at))
        books.snapshots = sorted(found, key=lambda k: k.seq)
        self.retain(keep)

    def retain(self, keep: Keep) -> None:
        """Of the snapshots that are there keep what `keep` needs; the log may begin with one of them."""
        books = self.books
        if not books.snapshots:
            return
        marks = {SnapshotPoint(k.seq, k.version, k.at): k for k in books.snapshots}
        rollbacks = [
            seq for seq, record in self._after(min(m.seq for m in marks)) if record["kind"] == "rolled_back"
        ]
        wanted = kept(list(marks), keep, bool(books.dropped), max(rollbacks, default=0))
        if wanted.base is not None and (row := books.versions.get(wanted.base.version)) is not None:
            self._begin = row.seq
        books.snapshots = [marks[mark] for mark in wanted.marks]
        self.shelf.retain([found.seq for found in books.snapshots])

    def trim(self, events_max: int) -> int:
        """Drop so many of the events that need not be kept; returns how many were."""
        books = self.books
        count = max(0, min(events_max, self._begin - 1 - books.dropped))
        last = books.dropped + count
        for text in books.lines[:count]:
            if (record := json.loads(text))["kind"] == "update":
                books.receipts.pop(record["update_id"], None)
                del books.updates[record["update_id"]]
        del books.lines[:count]
        books.dropped = last
        for version in [v for v, row in books.versions.items() if row.seq <= last]:
            books.links.append(books.versions.pop(version).link or "")
        if count:
            named = {found.sha256 for text in books.lines if (found := payload_of(json.loads(text)))}
            self.blobs.payloads = {k: v for k, v in self.blobs.payloads.items() if k in named}
        return count

    def links(self, after: int, limit: int) -> list[str]:
        """Links of the versions above `after`, in order and without a gap; of versions that are gone too."""
        books = self.books
        newer = [books.versions[v].link or "" for v in sorted(books.versions)]
        return list(islice(takewhile(bool, [*books.links, *newer][after:]), limit))

    def metrics(self, version: int) -> dict[str, float]:
        """What was reported of a version, whether the log still has it or not."""
        return dict(self.books.metrics.get(version, {}))

    def load(self) -> Recovery:
        """The newest good snapshot and the events after it."""
        return self._recovery(self.books.snapshots[::-1])

    def first(self) -> Recovery:
        """Where the log begins."""
        return (
            self._recovery(self.books.snapshots) if self.books.dropped else Recovery(None, 0, self._after(0))
        )

    def _recovery(self, snapshots: Sequence[_Kept]) -> Recovery:
        for found in snapshots:
            if found.is_whole:
                snapshot = self.books.rows.read(_read(found.data), found.seq)
                if missing := self.shelf.missing(set(rows_named(snapshot.meta))):
                    log.warning("snapshot %d names %d rows that are not there", found.seq, len(missing))
                    continue
                return Recovery(snapshot, found.seq, self._after(found.seq), found.at)
            log.warning("snapshot %d is damaged: going on without it", found.seq)
        if self.books.dropped:
            raise StoreCorrupt("no snapshot can be read, and the log does not begin with its first event")
        return Recovery(None, 0, self._after(0))

    def records(self, after: int = 0) -> Iterator[tuple[int, Record]]:
        """The log after an event."""
        return self._after(after)

    def _after(self, seq: int) -> Iterator[tuple[int, Record]]:
        seq = max(seq, self.books.dropped)
        while seq < self.books.last:
            seq += 1
            yield seq, json.loads(self.books.lines[seq - self.books.dropped - 1])

    def versions(self, after: int = 0, limit: int = 1000) -> list[VersionRow]:
        """Published versions above `after`, in order."""
        books, kept = self.books, {k.version for k in self.books.snapshots}
        found = sorted(v for v in books.versions if v > after)[:limit]
        return [
            replace(books.versions[v], snapshot=v in kept, metrics=dict(books.metrics.get(v, {})))
            for v in found
        ]

    def add_metrics(self, version: int, metrics: Mapping[str, float], at: float) -> None:
        """Metrics of a version; a later value replaces the earlier. Values not finite are left out."""
        mine = self.books.metrics.setdefault(version, {})
        mine |= {row["name"]: row["value"] for row in metric_rows(version, metrics, at)}

    def tags(self) -> dict[str, tuple[str, ...]]:
        """The operators' notes on clients."""
        return {client_id: tuple(sorted(its)) for client_id, its in sorted(self.books.tags.items()) if its}

    def tag(self, client_ids: Sequence[str], add: Sequence[str], remove: Sequence[str]) -> None:
        """Give clients notes, and take others away."""
        for client_id in client_ids:
            its = self.books.tags.get(client_id, set())
            self.books.tags[client_id] = (its | set(add)) - set(remove)

    def problems(self, after: int = 0) -> list[str]:  # noqa: ARG002
        """Every broken invariant that a look at the books can tell, in words."""
        books, found = self.books, []
        for seq, record in self._after(0):
            if (named := payload_of(record)) is None:
                continue
            try:
                self.payload(named)
            except StoreCorrupt as error:
                what = f"update {record['update_id']!r}" if record["kind"] == "update" else f"event {seq}"
                found.append(f"{what}: {error}")
        damaged = [k for k in books.snapshots if not k.is_whole]
        found += [f"snapshot {k.seq} does not have its SHA-256" for k in damaged]
        first = min(books.versions, default=1)
        if sorted(books.versions) != list(range(first, len(books.versions) + first)):
            found.append("some versions are missing")
        return found

    def close(self) -> None:
        """Stop writing; what was taken stays until the object goes."""
        self._started = False
