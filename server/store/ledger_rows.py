"""Clients and receipts of snapshots as rows: written as they change, read as they were at any kept snapshot.

A client has a row for each snapshot since which something of it had changed, so that an older snapshot finds
what was known then; rows that no kept snapshot reads any more go with the snapshots. A receipt never changes.
What is written again after a crash is the same, since the log is.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from functools import lru_cache
from itertools import islice
from typing import Any

from sqlalchemy import Connection, delete, func, select

from anabranch.core.engine.ledger import CAPABILITIES_KEPT, ClientRecord
from anabranch.core.errors import StoreCorrupt
from anabranch.core.model.updates import Capability, Decision, Reason, Receipt, Verdict
from anabranch.core.snapshot import (
    FORMAT,
    Snapshot,
    SnapshotRows,
    capability_of,
    capability_row,
    receipt_of,
    receipt_row,
)
from anabranch.server.store.projections import upsert
from anabranch.server.store.rows import Row
from anabranch.server.store.schema import client_records, enrolments, receipts

AT_ONCE = 5_000  # rows in memory beside the ledger
LOST = Decision(Verdict.REJECTED, 0, None, Reason.UNKNOWN_TASK, "what was decided of it is lost")
_REST = tuple(f.name for f in fields(ClientRecord) if f.name != "capability")

log = logging.getLogger(__name__)


# --- texts -------------------------------------------------------------------------------------


@lru_cache(CAPABILITIES_KEPT)
def capability_text(capability: Capability) -> str:
    """A device's capability as JSON."""
    return json.dumps(capability_row(capability), sort_keys=True)


def record_text(client: ClientRecord) -> str:
    """All else that is known of a client, as JSON."""
    known = {name: getattr(client, name) for name in _REST}
    if not client.steps:  # there was a time when they were not there
        del known["steps"]
    return json.dumps(known)


def receipt_text(receipt: Receipt, answers_task: bool) -> str:
    """A receipt as JSON."""
    return json.dumps([*receipt_row(receipt), receipt.client_id, receipt.sha256, answers_task])


def _receipts_of(lines: Iterable[str]) -> Iterator[tuple[Receipt, bool]]:
    """The receipts of their texts, many in one piece of JSON: there may be a hundred thousand."""
    lines = iter(lines)
    while some := list(islice(lines, AT_ONCE)):
        for *row, client_id, sha256, answers_task in json.loads(f"[{','.join(some)}]"):
            yield receipt_of(row, client_id, sha256), answers_task


class ClientReader:
    """Makes clients of their texts; what is the same of many is kept once."""

    def __init__(self) -> None:
        self._capabilities: dict[str, Capability] = {}

    def __call__(self, capability: str, record: str) -> ClientRecord:
        """The client. Raises `ValueError`, `TypeError` and `KeyError` where that is none."""
        known = self._capabilities.get(capability)
        if known is None:
            known = self._capabilities[capability] = capability_of(json.loads(capability))
        rest = json.loads(record)
        steps = tuple((float(share), float(step_s)) for share, step_s in rest.pop("steps", ()))
        return ClientRecord(known, **rest, steps=steps)


def whole(snapshot: Snapshot, clients: Iterable[tuple[str, ClientRecord]], lines: Iterable[str]) -> Snapshot:
    """A snapshot with all its clients and receipts. Raises `StoreCorrupt` if it is not as many as it says."""
    meta = dict(snapshot.meta)
    named = meta.pop("rows")
    first, last = named["receipts"]
    found = SnapshotRows(dict(clients), list(_receipts_of(lines)))
    counts = (
        (len(found.clients), named["clients"], "clients"),
        (len(found.receipts), last - first, "receipts"),
    )
    for count, wanted, what in counts:
        if count != wanted:
            raise StoreCorrupt(f"the snapshot of version {meta['version']} has {count} {what} of {wanted}")
    return replace(snapshot, meta={**meta, "format": FORMAT}, rows=found)


def span_of(snapshot: Snapshot) -> tuple[int, int, int]:
    """How many clients a snapshot has, and the numbers of its receipts: the last that is gone, the newest."""
    named = snapshot.meta["rows"]
    return named["clients"], *named["receipts"]


# --- tables ------------------------------------------------------------------------------------


def write_rows(connection: Connection, snapshot: Snapshot, seq: int) -> None:
    """What has changed, in the transaction that names the snapshot after event `seq`."""
    if snapshot.rows is None:
        return
    count, _, last = span_of(snapshot)
    new, changed = snapshot.rows.enrolled, snapshot.rows.clients
    places: Iterator[Row] = (
        {"place": place, "client_id": client_id} for place, client_id in enumerate(new, count - len(new))
    )
    records = (_client_row(*client, seq) for client in changed.items())
    first = last - len(snapshot.rows.receipts)
    told = (_receipt_row(n, seq, *found) for n, found in enumerate(snapshot.rows.receipts, first + 1))
    for table, rows in ((enrolments, places), (client_records, records), (receipts, told)):
        while some := list(islice(rows, AT_ONCE)):
            upsert(connection, table, some)


def read_rows(connection: Connection, snapshot: Snapshot, seq: int, mends: bool = False) -> Snapshot:
    """A snapshot with what it has as rows. Raises `StoreCorrupt`.

    `mends`: a receipt that is damaged or missing is one of no update then, and the rest is as it was.
    """
    if "rows" not in snapshot.meta:
        return snapshot
    count, first, last = span_of(snapshot)
    return whole(snapshot, _clients(connection, count, seq), _receipts(connection, first, last, mends))


def clear_rows(connection: Connection, snapshot: Snapshot, before: int, oldest: int) -> None:
    """Remove what no kept snapshot reads: this is the newest, the oldest was `before` until now."""
    if snapshot.rows is None:
        return
    c, newer, lately = client_records.c, client_records.alias(), client_records.alias()
    seq = newer.c.applied_through_seq
    follows = select(newer).where(
        newer.c.client_id == c.client_id, seq > c.applied_through_seq, seq <= oldest
    )
    changed = select(lately.c.client_id).where(
        lately.c.applied_through_seq > before, lately.c.applied_through_seq <= oldest
    )
    superseded = delete(client_records).where(c.client_id.in_(changed), c.applied_through_seq < oldest)
    connection.execute(superseded.where(follows.exists()))
    _, first, last = span_of(snapshot)
    r = receipts.c
    newest = select(func.max(r.number)).where(r.applied_through_seq <= oldest).scalar_subquery()
    connection.execute(delete(receipts).where(r.number <= newest - (last - first)))


def _client_row(client_id: str, client: ClientRecord, seq: int) -> Row:
    texts = {"capability": capability_text(client.capability), "record": record_text(client)}
    row = {"client_id": client_id, "applied_through_seq": seq, **texts}
    return {**row, "crc32": _crc32(row.values())}


def _receipt_row(number: int, seq: int, receipt: Receipt, answers_task: bool) -> Row:
    row = {"number": number, "applied_through_seq": seq, "receipt": receipt_text(receipt, answers_task)}
    return {**row, "crc32": _crc32(row.values())}


def _crc32(values: Iterable[Any]) -> int:
    return zlib.crc32("\n".join(map(str, values)).encode())


def _clients(connection: Connection, count: int, seq: int) -> Iterator[tuple[str, ClientRecord]]:
    e, c, newest, read = enrolments.c, client_records.c, client_records.alias(), ClientReader()
    then = select(func.max(newest.c.applied_through_seq)).where(
        newest.c.client_id == e.client_id, newest.c.applied_through_seq <= seq
    )
    query = (
        select(client_records)
        .select_from(enrolments)
        .join(client_records, c.client_id == e.client_id)
        .where(c.applied_through_seq == then.correlate(enrolments).scalar_subquery())
        .order_by(e.place)
    )
    for place in range(0, count, AT_ONCE):
        page = query.where(e.place >= place, e.place < min(place + AT_ONCE, count))
        for row in connection.execute(page):
            _check(row)
            yield row.client_id, read(row.capability, row.record)


def _receipts(connection: Connection, first: int, last: int, mends: bool) -> Iterator[str]:
    r = receipts.c
    for before in range(first, last, AT_ONCE):
        end = min(before + AT_ONCE, last)
        page = select(receipts).where(r.number > before, r.number <= end).order_by(r.number)
        found = {row.number: row for row in connection.execute(page)}
        for number in range(before + 1, end + 1) if mends else found:
            try:
                yield _checked(found[number])
            except (KeyError, StoreCorrupt):
                if not mends:
                    raise
                yield _lost(number)


def _checked(row: Any) -> str:
    _check(row)
    text: str = row.receipt
    return text


def _lost(number: int) -> str:
    """A receipt in the place of one that is lost: no device can ask for it, its name is no id."""
    log.warning(
        "receipt %d is damaged, and no snapshot is without it: the run goes on without that one, and should "
        "its update be sent again, the answer is unknown_task",
        number,
    )
    name = f"(lost: {number})"
    return receipt_text(Receipt(name, name, 0, LOST), answers_task=False)


def _check(row: Any) -> None:
    *values, crc32 = row
    if _crc32(values) != crc32:
        raise StoreCorrupt(
            f"a row of a snapshot is damaged: {row[0]!r} after event {row.applied_through_seq}"
        )
