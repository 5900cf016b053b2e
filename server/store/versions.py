"""Published versions, their metrics and the links of their chain, as rows of the tables."""

from __future__ import annotations

from itertools import islice, takewhile

from sqlalchemy import Connection, exists, select

from anabranch.server.store.base import VersionRow
from anabranch.server.store.schema import metrics, model_versions, snapshots
from anabranch.server.store.trimming import old_links_after


def read_versions(connection: Connection, after: int, limit: int) -> list[VersionRow]:
    """Versions above `after`, in order."""
    table = model_versions
    has_snapshot = exists().where(snapshots.c.version == table.c.version)
    query = select(table, has_snapshot.label("snapshot")).where(table.c.version > after)
    found = connection.execute(query.order_by(table.c.version).limit(limit)).all()
    if not found:
        return []
    values: dict[int, dict[str, float]] = {row.version: {} for row in found}
    span = metrics.c.version.between(found[0].version, found[-1].version)
    for m in connection.execute(select(metrics).where(span).order_by(metrics.c.name)):
        values[m.version][m.name] = m.value
    return [
        VersionRow(
            version=row.version,
            sha256=row.sha256,
            updates=row.updates,
            published_at=row.published_at,
            snapshot=bool(row.snapshot),
            metrics=values[row.version],
            seq=row.applied_through_seq,
            link=row.link,
            head=row.head,
        )
        for row in found
    ]


def read_links(connection: Connection, after: int, limit: int) -> list[str]:
    """Links of the versions above `after`, in order and without a gap; of versions that are gone too."""
    v = model_versions.c
    found = list(islice(old_links_after(connection, after, limit), limit))
    newer = select(v.version, v.link).where(v.version > after + len(found)).order_by(v.version)
    more = connection.execute(newer.limit(limit - len(found))).all()
    begun = takewhile(
        lambda of: of[1].version == of[0] and of[1].link, enumerate(more, after + len(found) + 1)
    )
    return [*found, *(row.link for _, row in begun)]


def read_metrics(connection: Connection, version: int) -> dict[str, float]:
    """What was reported of a version."""
    m = metrics.c
    found = connection.execute(select(m.name, m.value).where(m.version == version))
    return {row.name: row.value for row in found}
