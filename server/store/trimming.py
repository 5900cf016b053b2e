"""Drops what a log has behind its base (`core.retention`), a bounded piece at a time.

What goes: events, updates and keepers' answers with their payloads, leases that had ended, and versions. What
stays of a version is its link in the chain of hashes, 32 bytes, so that a device that was away since then can
follow the chain, and its metrics. The event that published the base's version stays as well: the chain goes
on from it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, inspect, select

from anabranch.core.retention import Keep, KeptSnapshots, SnapshotPoint, kept
from anabranch.identity.heads import HASH_BYTES
from anabranch.server.store.archive import ArchivedEvent
from anabranch.server.store.packs import IN_A_FILE
from anabranch.server.store.projections import upsert
from anabranch.server.store.rows import Row, receipt_of_update
from anabranch.server.store.schema import (
    events,
    leases,
    mask_sums,
    model_versions,
    old_links,
    snapshots,
    updates,
)

LINKS_IN_ROW = 4096
TOLD_EVENTS = 10_000  # to be dropped: so many take a while
_BY_EVENT = "ix_model_versions_applied_through_seq"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """What was dropped: so many events, and payloads in files of their own, by their SHA-256."""

    events: int = 0
    payloads: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Retained:
    """Snapshots that are kept, by event and by SHA-256; `begin`: the event the log may begin with, or 0."""

    seqs: list[int]
    sha256s: set[str]
    begin: int


class Progress:
    """Of a log of which much is dropped: said when it begins, and when it has ended. Else it is not seen."""

    def __init__(self) -> None:
        self._first = 0  # the event with which the log began then

    def goes_on(self, first: int, begin: int) -> None:
        """The log begins with one event, and may with another."""
        if not self._first and begin - first >= TOLD_EVENTS:
            self._first = first
            log.info("dropping %d events up to event %d: server.keep lets them go", begin - first, begin - 1)

    def over(self, first: int) -> None:
        """Nothing is left to be dropped."""
        if self._first:
            log.info("dropped %d events: the log begins with event %d", first - self._first, first)
        self._first = 0


def begins_late(connection: Connection) -> bool:
    """Whether the log begins with a snapshot, the oldest one, instead of its first event."""
    return (
        first_event(connection) > 1
        and connection.execute(select(old_links.c.first).limit(1)).first() is not None
    )


def first_event(connection: Connection) -> int:
    """The first event that is here."""
    return connection.scalar(select(events.c.seq).order_by(events.c.seq).limit(1)) or 1


def retain(connection: Connection, keep: Keep) -> Retained:
    """Forget snapshots but those to keep."""
    s = snapshots.c
    found = connection.execute(select(snapshots).order_by(s.applied_through_seq)).all()
    marks = [SnapshotPoint(row.applied_through_seq, row.version, row.created_at) for row in found]
    wanted, begin = _wanted(connection, marks, keep) if marks else (KeptSnapshots((), None), 0)
    seqs = [mark.seq for mark in wanted.marks]
    connection.execute(delete(snapshots).where(s.applied_through_seq.not_in(seqs)))
    return Retained(seqs, {row.sha256 for row in found if row.applied_through_seq in seqs}, begin)


def _wanted(connection: Connection, marks: Sequence[SnapshotPoint], keep: Keep) -> tuple[KeptSnapshots, int]:
    e = events.c
    has_base, rolled_back = begins_late(connection), 0
    if not keep.is_all:
        rollbacks = select(func.max(e.seq)).where(e.kind == "rolled_back", e.seq > marks[0].seq)
        rolled_back = connection.scalar(rollbacks) or 0
    wanted = kept(marks, keep, has_base, rolled_back)
    if wanted.base is None:
        return wanted, 0
    v = model_versions.c
    published = select(v.applied_through_seq, v.head).where(v.version == wanted.base.version)
    row = connection.execute(published).one_or_none()
    if row is None or row.head is None:  # of before there was a chain: it could not go on from here
        return kept(marks, Keep(), has_base), 0
    return wanted, row.applied_through_seq


def oldest(connection: Connection, before: int, events_max: int, bytes_max: int = 0) -> int:
    """The last of so many of the events before one, and of so much of payloads (0: any), 0 for none."""
    e, u = events.c, updates.c
    m = mask_sums.c
    size = func.coalesce(u.size_bytes, m.size_bytes, 0).label("size_bytes")
    both = events.outerjoin(updates, u.seq == e.seq).outerjoin(mask_sums, m.seq == e.seq)
    query = select(e.seq, size).select_from(both).where(e.seq < before)
    last = size_bytes = 0
    for row in connection.execute(query.order_by(e.seq).limit(events_max)).all():
        size_bytes += row.size_bytes
        if last and 0 < bytes_max < size_bytes:
            break
        last = row.seq
    return last


def archived(connection: Connection, through: int) -> list[ArchivedEvent]:
    """The events up to one, as an archive has them."""
    decided = select(updates).where(updates.c.seq <= through, updates.c.verdict.is_not(None))
    receipts = {row["seq"]: receipt_of_update(dict(row)) for row in connection.execute(decided).mappings()}
    query = select(events.c.seq, events.c.record).where(events.c.seq <= through).order_by(events.c.seq)
    return [
        ArchivedEvent(row.seq, json.loads(row.record), receipts.get(row.seq))
        for row in connection.execute(query)
    ]


def trim(connection: Connection, through: int) -> Piece:
    """Drop the events up to one, with all that hangs on them."""
    e, u, v = events.c, updates.c, model_versions.c
    page = connection.execute(select(e.seq, e.at).where(e.seq <= through).order_by(e.seq)).all()
    if not page:
        return Piece()
    last = page[-1]
    _find_versions_by_event(connection)
    files = select(u.sha256).where(u.seq <= last.seq, IN_A_FILE)
    payloads = frozenset(connection.scalars(files))
    connection.execute(delete(updates).where(u.seq <= last.seq))
    connection.execute(delete(mask_sums).where(mask_sums.c.seq <= last.seq))
    gone = select(v.version, v.link).where(v.applied_through_seq <= last.seq).order_by(v.version)
    _keep_links(connection, [(row.version, row.link) for row in connection.execute(gone)])
    connection.execute(delete(model_versions).where(v.applied_through_seq <= last.seq))
    connection.execute(delete(leases).where(leases.c.state != "leased", leases.c.ended_at <= last.at))
    connection.execute(delete(events).where(e.seq <= last.seq))
    return Piece(len(page), payloads)


def old_links_after(connection: Connection, version: int, limit: int) -> Iterator[str]:
    """Links of versions that were dropped, above this one, in hex, in order and without a gap."""
    o = old_links.c
    rows = select(old_links).where(o.last > version).order_by(o.first)
    for row in connection.execute(rows.limit(limit // LINKS_IN_ROW + 2)):
        if row.first > version + 1:
            return
        for number in range(version + 1, row.last + 1):
            start = (number - row.first) * HASH_BYTES
            yield row.links[start : start + HASH_BYTES].hex()
        version = row.last


def unnamed(connection: Connection, payloads: set[str]) -> set[str]:
    """Those of these payloads that no update in the log has as a file."""
    u = updates.c
    named = select(u.sha256).where(u.sha256.in_(payloads), IN_A_FILE)
    return payloads - set(connection.scalars(named))


def _find_versions_by_event(connection: Connection) -> None:
    """Let the database find the versions of an event, as it does for each that is dropped: they refer to it.

    Without an index it reads all versions each time. It comes with the first piece and by no revision, so
    that a log that is kept whole does without, and older releases read the data.
    """
    table = model_versions.name
    if all(index["name"] != _BY_EVENT for index in inspect(connection).get_indexes(table)):
        connection.exec_driver_sql(f"CREATE INDEX {_BY_EVENT} ON {table} (applied_through_seq)")


def _keep_links(connection: Connection, gone: list[tuple[int, str | None]]) -> None:
    """Put links to those that were kept before; a version without one is of before there was a chain."""
    newest = connection.execute(select(old_links).order_by(old_links.c.first.desc()).limit(1)).one_or_none()
    first, data = (1, b"") if newest is None else (newest.first, newest.links)
    # There is a row as soon as anything was dropped: a log that lacks events without one is damaged.
    rows: list[Row] = [{"first": first, "last": first + len(data) // HASH_BYTES - 1, "links": data}]
    for version, link in gone:
        if link is None:
            continue
        if version != first + len(data) // HASH_BYTES or len(data) >= LINKS_IN_ROW * HASH_BYTES:
            first, data = version, b""
        data += bytes.fromhex(link)
        if rows and rows[-1]["first"] == first:
            rows.pop()
        rows.append({"first": first, "last": version, "links": data})
    upsert(connection, old_links, rows)
