"""What is wrong with the stored data, in words: everything that a look at the tables can tell.

Whether the model is the fold of the log is for a replay to say, not for the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Select, and_, exists, false, func, or_, select

from anabranch.core.config.privacy import PrivacyTable
from anabranch.core.content import digest_like
from anabranch.core.errors import StoreCorrupt
from anabranch.server.store.blobs import BlobStore
from anabranch.server.store.ledger_rows import read_rows
from anabranch.server.store.packs import Packs, read_payload
from anabranch.server.store.schema import events, leases, mask_sums, model_versions, runs, snapshots, updates
from anabranch.server.store.snapshots import SnapshotFiles
from anabranch.server.store.trimming import begins_late

PAGE = 64  # payloads in memory at a time


def find_problems(connection: Connection, blobs: BlobStore, packs: Packs, after: int = 0) -> list[str]:
    """Every broken invariant, in words; empty when all hold. Payloads from after an event on.

    Less those of snapshots, see `snapshot_problems`.
    """
    return [
        *_log(connection),
        *_counts(connection),
        *_decisions(connection),
        *_versions(connection),
        *_leases(connection),
        *_payloads(connection, blobs, packs, after),
        *_mask_sums(connection, packs, after),
    ]


def snapshot_problems(connection: Connection, files: SnapshotFiles) -> Iterator[tuple[str, str]]:
    """What is wrong with snapshots: the digest of one, and what it is, in words."""
    last = connection.scalar(select(func.max(events.c.seq))) or 0
    for row in connection.execute(select(snapshots).order_by(snapshots.c.applied_through_seq)).all():
        if row.applied_through_seq > last:
            ahead = f"snapshot {row.applied_through_seq} is ahead of the log, which ends at event {last}"
            yield row.sha256, ahead
        try:
            snapshot = files.read(row.sha256)
        except StoreCorrupt as error:
            yield row.sha256, str(error)
            continue
        if (version := snapshot.meta["version"]) != row.version:
            other = f"snapshot {row.applied_through_seq} has version {version}, not {row.version}"
            yield row.sha256, other
        try:
            read_rows(connection, snapshot, row.applied_through_seq)
        except StoreCorrupt as error:
            yield row.sha256, f"snapshot {row.applied_through_seq}: {error}"


def _log(connection: Connection) -> Iterator[str]:
    count, first, last = connection.execute(
        select(func.count(), func.min(events.c.seq), func.max(events.c.seq)).select_from(events)
    ).one()
    late = begins_late(connection)
    if count and (last - first + 1 != count or (first != 1 and not late)):
        yield f"the log has {count} events numbered {first} to {last}: some are missing"
    lonely = events.outerjoin(updates, events.c.seq == updates.c.seq)
    query = select(events.c.seq).select_from(lonely)
    for (seq,) in connection.execute(query.where(events.c.kind == "update", updates.c.seq.is_(None))):
        yield f"event {seq} is an update without a row in updates"
    for seq, kind in connection.execute(
        select(updates.c.seq, events.c.kind)
        .join(events, events.c.seq == updates.c.seq)
        .where(events.c.kind != "update")
    ):
        yield f"update {seq} comes of an event of kind {kind!r}"


def _counts(connection: Connection) -> Iterator[str]:
    """Nothing counts twice."""
    for column, which in ((updates.c.update_id, None), (updates.c.task_id, ("held", "applied"))):
        query = select(column, func.count()).group_by(column).having(func.count() > 1)
        if which:
            query = query.where(updates.c.state.in_(which))
        for name, count in connection.execute(query):
            yield f"{column.name} {name!r} counts {count} times"


def _decisions(connection: Connection) -> Iterator[str]:
    u, latest = updates.c, select(func.max(snapshots.c.applied_through_seq)).scalar_subquery()
    yield from _each(
        connection,
        select(u.update_id).where(u.state == "received", u.seq <= latest),
        "update {!r} is folded into a snapshot, but not decided",
    )
    yield from _each(
        connection,
        select(u.update_id).where(u.state == "rejected", u.reason == ""),
        "update {!r} is rejected without a reason",
    )
    flawed = false() if _is_private(connection) else u.flawed  # which count as zeros there
    yield from _each(
        connection,
        select(u.update_id).where(u.state.in_(("held", "applied")), or_(u.weight.is_(None), flawed)),
        "update {!r} is taken, but has no weight or is flawed",
    )
    unknown = ~exists().where(model_versions.c.version == u.applied_version)
    yield from _each(
        connection,
        select(u.update_id, u.applied_version).where(u.state == "applied", unknown),
        "update {!r} is applied in version {}, which is not known",
    )


def _is_private(connection: Connection) -> bool:
    config = connection.scalar(select(runs.c.config))
    return config is not None and PrivacyTable.of_json(json.loads(config)).on


def _versions(connection: Connection) -> Iterator[str]:
    v = model_versions.c
    count, first, last = connection.execute(
        select(func.count(), func.min(v.version), func.max(v.version)).select_from(model_versions)
    ).one()
    late = begins_late(connection)
    if count and (last - first + 1 != count or (first != 1 and not late)):
        yield f"{count} versions are numbered {first} to {last}: some are missing"
    applied = (
        select(func.count()).where(updates.c.applied_version == v.version).correlate(model_versions)
    ).scalar_subquery()
    for version, claimed, found in connection.execute(
        select(v.version, v.updates, applied).where(v.updates != applied)
    ):
        if late and version <= first + 1 and found < claimed:  # of updates that were dropped
            continue
        yield f"version {version} was made of {claimed} updates, but {found} are applied in it"
    before = model_versions.alias()
    yield from _each(
        connection,
        select(v.version).join(
            before,
            and_(before.c.version == v.version - 1, before.c.applied_through_seq > v.applied_through_seq),
        ),
        "version {} folds fewer events than the one before it",
    )


def _leases(connection: Connection) -> Iterator[str]:
    taken = exists().where(
        updates.c.task_id == leases.c.task_id,
        updates.c.client_id == leases.c.client_id,
        updates.c.state.in_(("held", "applied")),
    )
    yield from _each(
        connection,
        select(leases.c.task_id).where(leases.c.state == "leased", taken),
        "lease {!r} is open, but its update was taken",
    )
    yield from _each(
        connection,
        select(leases.c.task_id).where(leases.c.state == "accepted", ~taken),
        "lease {!r} is accepted, but no update of it was taken",
    )


def _payloads(connection: Connection, blobs: BlobStore, packs: Packs, seq: int) -> Iterator[str]:
    """Every payload is there with its digest and size, and is the one that the log names."""
    query = select(updates, events.c.record).join(events, events.c.seq == updates.c.seq).limit(PAGE)
    while True:
        page = connection.execute(query.where(updates.c.seq > seq).order_by(updates.c.seq)).all()
        for row in page:
            yield from _payload(row, blobs, packs)
        if len(page) < PAGE:
            return
        seq = page[-1].seq


def _payload(row: Any, blobs: BlobStore, packs: Packs) -> Iterator[str]:
    record = json.loads(row.record)
    named = record.get("payload", {})
    if (record.get("update_id"), named.get("sha256")) != (row.update_id, row.sha256):
        yield f"update {row.update_id!r} differs from event {row.seq} of the log"
    if row.flawed:  # nothing was computed from its bytes, so they need not be kept
        return
    try:
        is_file = row.payload is None and row.pack is None
        data = blobs.read(row.sha256) if is_file else read_payload(row, packs)
    except StoreCorrupt as error:
        yield f"update {row.update_id!r}: {error}"
        return
    if len(data) != row.size_bytes or digest_like(data, row.sha256) != row.sha256:
        yield f"update {row.update_id!r}: its payload does not have its size and digest"


def _mask_sums(connection: Connection, packs: Packs, after: int) -> Iterator[str]:
    """Every keeper's answer is there with its digest, and is the one that the log names."""
    m, lonely = mask_sums.c, events.outerjoin(mask_sums, events.c.seq == mask_sums.c.seq)
    kind = events.c.kind == "mask_sum"
    if connection.execute(select(events.c.seq).where(kind).limit(1)).first() is None:
        return  # data of older releases do not even have the table
    yield from _each(
        connection,
        select(events.c.seq).select_from(lonely).where(kind, m.seq.is_(None)),
        "event {} is a keeper's answer without a row in mask_sums",
    )
    found = select(m.seq, events.c.record).join(events, events.c.seq == m.seq).where(m.seq > after)
    for seq, record in connection.execute(found.order_by(m.seq)).all():
        row = connection.execute(select(mask_sums).where(m.seq == seq)).one()
        if json.loads(record).get("payload", {}).get("sha256") != row.sha256:
            yield f"the keeper's answer {seq} differs from event {seq} of the log"
        try:
            read_payload(row, packs)
        except StoreCorrupt as error:
            yield f"event {seq}, a keeper's answer: {error}"


def _each(connection: Connection, query: Select[Any], words: str) -> Iterator[str]:
    for row in connection.execute(query):
        yield words.format(*row)
