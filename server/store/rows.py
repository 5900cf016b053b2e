"""Runs, events and updates as rows of the tables, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from anabranch.core.content import BETWEEN
from anabranch.core.errors import ManifestMismatch, StoreError
from anabranch.core.journal import Record
from anabranch.core.model.updates import Decision, Reason, Receipt, Verdict
from anabranch.server.store.base import Entry, RunInfo
from anabranch.server.store.packs import PackPlace

Row = dict[str, Any]
BIGINT_MAX = (1 << 63) - 1


def storable(text: str) -> str:
    """Text as both databases take it: no NUL, no lone surrogates."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def bounded(number: int) -> int:
    """The number, or the largest that a column holds. The log has it exactly."""
    return max(-BIGINT_MAX, min(int(number), BIGINT_MAX))


def update_id_of(entry: Entry) -> str | None:
    """The id of the update in an entry, None if it is another event."""
    return entry.record["update_id"] if entry.record["kind"] == "update" else None


def names_by_blake3(entry: Entry) -> bool:
    """Whether an entry has a payload that is not named by SHA-256."""
    payload = entry.record.get("payload")
    return payload is not None and BETWEEN in payload["sha256"]


class LoggedRows(NamedTuple):
    """The rows of an event: its own, and that of what it brings (of an update, say), if it does."""

    event: Row
    brought: Row | None

    @property
    def seq(self) -> int:
        """The event's number."""
        return int(self.event["seq"])

    @property
    def update_id(self) -> str | None:
        """The id of the update, None if it is another event."""
        return None if self.brought is None else self.brought.get("update_id")

    def lie_at(self, place: PackPlace | None) -> None:
        """Where the payload lies is known now: its bytes are let go."""
        if place is not None and self.brought is not None:
            self.brought.update(payload=None, pack=place.pack, pack_offset=place.offset)


def rows_of(seq: int, entry: Entry, place: PackPlace | None = None) -> LoggedRows:
    """The rows of an event with this number. `place`: where its payload lies, if in a pack."""
    match entry.record["kind"]:
        case "update":
            brought: Row | None = update_row(seq, entry, place)
        case "mask_sum":
            brought = mask_sum_row(seq, entry, place)
        case "enrolled":
            brought = client_row(entry.record)
        case _:
            brought = None
    return LoggedRows(event_row(seq, entry), brought)


def event_row(seq: int, entry: Entry) -> Row:
    """A row of `events`."""
    record = entry.record
    return {
        "seq": seq,
        "at": record["now"],
        "kind": record["kind"],
        "client_id": record.get("client_id"),
        "record": entry.line,
    }


def client_row(record: Record) -> Row:
    """A row of `clients`, of an enrolment."""
    return {
        "client_id": record["client_id"],
        "capability": json.dumps(record["capability"], sort_keys=True),
        "enrolled_at": record["now"],
        "seen_at": record["now"],
    }


def update_row(seq: int, entry: Entry, place: PackPlace | None) -> Row:
    """A row of `updates`, not yet decided. `place`: where its payload lies, if in a pack."""
    record = entry.record
    return {
        "seq": seq,
        "update_id": record["update_id"],
        "task_id": record["task_id"],
        "client_id": record["client_id"],
        "base_version": bounded(record["base_version"]),
        "examples": bounded(record["examples"]),
        "received_at": record["now"],
        "codec": record["payload"]["codec"],
        **_payload_columns(entry, place),
        "flawed": bool(record["flaw"]),
        "state": "received",
        "reason": "",
        "detail": "",
    }


def mask_sum_row(seq: int, entry: Entry, place: PackPlace | None) -> Row:
    """A row of `mask_sums`. `place`: where its payload lies, if in a pack."""
    record = entry.record
    return {
        "seq": seq,
        "number": bounded(record["number"]),
        "keeper": record["keeper"],
        **_payload_columns(entry, place),
    }


def _payload_columns(entry: Entry, place: PackPlace | None) -> Row:
    payload = entry.record["payload"]
    return {
        "sha256": payload["sha256"],
        "size_bytes": payload["size_bytes"],
        "payload": None if place else entry.inline,
        "pack": place.pack if place else None,
        "pack_offset": place.offset if place else None,
    }


def checked_rows(seq: int, entry: Entry) -> LoggedRows:
    """The rows of an entry. Raises `StoreError` where a table would not take them: before the log has it.

    The log is written first. What it has, and the tables refuse, could never be taken up.
    """
    try:
        found = rows_of(seq, entry)
        flaw = _flaw(entry, found)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        flaw = repr(error)
    if flaw:
        raise StoreError(f"an event of kind {entry.record.get('kind')!r} cannot be stored: {flaw}")
    return found


def _flaw(entry: Entry, found: LoggedRows) -> str:
    if "\\ud" in entry.line:  # so JSON writes lone surrogates, which are no text
        for value in (*found.event.values(), *(found.brought or {}).values()):
            str(value).encode()
    flaw = _row_flaw(found.event, {"client_id"})
    if found.brought is not None:
        flaw = flaw or _row_flaw(found.brought, {"payload", "pack", "pack_offset"})
        if "size_bytes" in found.brought:
            return flaw or _payload_flaw(entry, found.brought)
    return flaw if entry.inline is None else flaw or "bytes came with it, and none are named"


def _row_flaw(row: Row, optional: Set[str]) -> str:
    for name, value in row.items():
        if (value is None or value != value) and name not in optional:
            return f"{name} is {value!r}"
    return ""


def _payload_flaw(entry: Entry, row: Row) -> str:
    size_bytes = row["size_bytes"]
    if not 0 <= size_bytes <= BIGINT_MAX:
        return f"size_bytes is {size_bytes}"
    if entry.inline is None:
        return "its payload is not with it" if entry.record["kind"] == "mask_sum" else ""
    came = len(entry.inline)
    return "" if came == size_bytes else f"{came} bytes came with it, {size_bytes} are named"


def receipt_of_update(row: Mapping[str, Any]) -> Receipt:
    """The receipt in a row of `updates` that is decided."""
    decision = Decision(
        Verdict(row["verdict"]), row["staleness"], row["weight"], Reason(row["reason"]), row["detail"]
    )
    return Receipt(
        update_id=row["update_id"],
        task_id=row["task_id"],
        version=row["version"],
        decision=decision,
        client_id=row["client_id"],
        sha256=row["sha256"],
    )


def metric_rows(version: int, metrics: Mapping[str, float], at: float) -> list[Row]:
    """Rows of `metrics`. Values that are not finite are left out."""
    return [
        {"version": version, "name": storable(name), "value": float(value), "at": at}
        for name, value in metrics.items()
        if math.isfinite(value)
    ]


def run_row(info: RunInfo) -> Row:
    """The row of `runs`."""
    return {
        "run_id": info.run_id,
        "name": storable(info.name),
        "config": json.dumps(dict(info.config), sort_keys=True),
        "layout": json.dumps(info.layout),
        "initial_sha256": info.initial_sha256,
        "created_at": info.created_at,
    }


def info_of(row: Mapping[str, Any]) -> RunInfo:
    """The inverse of `run_row`."""
    return RunInfo(**{**row, "config": json.loads(row["config"]), "layout": json.loads(row["layout"])})


def check_same_run(stored: RunInfo, given: RunInfo, where: str) -> None:
    """Raises `ManifestMismatch` if a stored run is of another model than the given one."""
    what = ""
    if json.dumps(stored.layout) != json.dumps(given.layout):
        what = "other tensors or units"
    elif stored.initial_sha256 != given.initial_sha256:
        what = "other first weights"
    if what:
        raise ManifestMismatch(
            f"the run {stored.name!r} in {where} started from another model than this one, with {what}: "
            "serve the one that it started from (its server has kept it: --model DATA_DIR/manifest), "
            "or start a run of its own for this one with --data-dir DIR"
        )
