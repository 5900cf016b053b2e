"""What the log implies, written into the tables for look-ups and audits.

Every write may be repeated: after a crash the events since the last snapshot are handled again, and
so are their effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, Table, bindparam, update

from anabranch.core.effects import Decided, Granted, LeaseEnded, Published
from anabranch.core.model.updates import Reason, Task, Verdict
from anabranch.server.store.base import Projection
from anabranch.server.store.rows import Row, bounded, storable
from anabranch.server.store.schema import leases, model_versions, updates
from anabranch.server.store.statements import Statement

# The lease of such an update is another client's, or was used up by another update.
_NOT_THIS_LEASE = (Reason.UNKNOWN_TASK, Reason.DUPLICATE_TASK)

PROJECTED = (Granted, LeaseEnded, Decided, Published)  # the effects of which something is written

_END_LEASE = Statement(
    update(leases)
    .where(leases.c.task_id == bindparam("task"), leases.c.client_id == bindparam("client"))
    .values(state=bindparam("new_state"), ended_at=bindparam("at"))
)
_DECIDE = Statement(
    update(updates)
    .where(updates.c.seq == bindparam("at_seq"), updates.c.state == "received")
    .values(
        {
            name: bindparam(f"new_{name}")
            for name in ("state", "verdict", "version", "staleness", "weight", "reason", "detail")
        }
    )
)
_APPLY = Statement(
    update(updates)
    .where(updates.c.update_id == bindparam("id"), updates.c.state == "held")
    .values(state="applied", applied_version=bindparam("in_version"))
)
_DIGEST = Statement(
    update(model_versions)
    .where(model_versions.c.version == bindparam("of_version"), model_versions.c.sha256.is_(None))
    .values(sha256=bindparam("digest"))
)


def upsert(
    connection: Connection, table: Table, rows: Sequence[Row], replaced: Sequence[str] | None = None
) -> None:
    """Insert rows; where the primary key is there, replace these columns (None: all of them)."""
    if not rows:
        return
    keys = {column.name for column in table.primary_key}
    names = tuple(n for n in rows[0] if n not in keys) if replaced is None else tuple(replaced)
    _upserting(connection.dialect.name, table, names).many(connection, rows)


def _insert(dialect: str) -> Any:
    """The `insert` of a database. PostgreSQL's takes a twentieth of a start to import."""
    if dialect == "sqlite":
        from sqlalchemy.dialects.sqlite import insert as of_sqlite

        return of_sqlite
    from sqlalchemy.dialects.postgresql import insert as of_postgresql

    return of_postgresql


@cache  # to make one takes as long as to execute a dozen
def _upserting(dialect: str, table: Table, replaced: tuple[str, ...]) -> Statement:
    """The statement that inserts a row, or replaces these columns of the one that is there."""
    statement: Any = _insert(dialect)(table)
    keys = [column.name for column in table.primary_key]
    if not replaced:
        return Statement(statement.on_conflict_do_nothing(index_elements=keys))
    new = {name: statement.excluded[name] for name in replaced}
    return Statement(statement.on_conflict_do_update(index_elements=keys, set_=new))


def write_projections(connection: Connection, projections: Sequence[Projection]) -> None:
    """Write the projections of earlier events, in their order."""
    grants: dict[str, Row] = {}
    ends: list[Row] = []
    decisions: list[Row] = []
    applied: list[Row] = []
    versions: dict[int, Row] = {}
    digests: list[Row] = []
    for projection in projections:
        for effect in projection.effects:
            match effect:
                case Granted(task, again=False):
                    grants[task.task_id] = _lease(task)
                case LeaseEnded(task, end):
                    ends.append(_end(task.task_id, task.client_id, end.value, projection.now))
                case Decided(duplicate=False):
                    decisions.append(_decision(projection.seq, effect))
                    ends += _answered(effect, projection.now)
                case Published():
                    versions.setdefault(effect.version, _version(effect, projection))
                    applied += [{"id": i, "in_version": effect.version} for i in effect.update_ids]
        digests += [{"of_version": v, "digest": d} for v, d in projection.digests.items()]
    upsert(connection, leases, list(grants.values()))
    upsert(connection, model_versions, list(versions.values()), replaced=())
    for statement, rows in ((_END_LEASE, ends), (_DECIDE, decisions), (_APPLY, applied), (_DIGEST, digests)):
        statement.many(connection, rows)


def _lease(task: Task) -> Row:
    return {
        "task_id": task.task_id,
        "client_id": task.client_id,
        "base_version": bounded(task.base_version),
        "state": "leased",
        "granted_at": task.granted_at,
        "expires_at": task.expires_at,
        "ended_at": None,
    }


def _end(task_id: str, client_id: str, state: str, at: float) -> Row:
    return {"task": task_id, "client": client_id, "new_state": state, "at": at}


def _answered(effect: Decided, at: float) -> list[Row]:
    receipt = effect.receipt
    if receipt.decision.reason in _NOT_THIS_LEASE:
        return []
    state = "rejected" if receipt.decision.verdict is Verdict.REJECTED else "accepted"
    return [_end(receipt.task_id, effect.client_id, state, at)]


def _decision(seq: int, effect: Decided) -> Row:
    receipt, decision = effect.receipt, effect.receipt.decision
    return {
        "at_seq": seq,
        "new_state": "rejected" if decision.verdict is Verdict.REJECTED else "held",
        "new_verdict": decision.verdict.value,
        "new_version": receipt.version,
        "new_staleness": bounded(decision.staleness),
        "new_weight": decision.weight,
        "new_reason": decision.reason.value,
        "new_detail": storable(decision.detail),
    }


def _version(effect: Published, projection: Projection) -> Row:
    link = projection.links.get(effect.version)
    return {
        "version": effect.version,
        "sha256": projection.digests.get(effect.version),
        "updates": len(effect.update_ids),
        "applied_through_seq": projection.seq,
        "published_at": projection.now,
        "link": None if link is None else link.link,
        "head": None if link is None else link.head,
    }
