"""The operators' notes on clients, as rows of a table. No event has them: nothing is decided by them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, select

from anabranch.server.store.projections import upsert
from anabranch.server.store.schema import tags


def read_tags(connection: Connection) -> dict[str, tuple[str, ...]]:
    """By client, in order."""
    found: dict[str, tuple[str, ...]] = {}
    for client_id, tag in sorted((row.client_id, row.tag) for row in connection.execute(select(tags))):
        found[client_id] = (*found.get(client_id, ()), tag)
    return found


def write_tags(
    connection: Connection, client_ids: Sequence[str], add: Sequence[str], remove: Sequence[str]
) -> None:
    """Give clients some, and take others away."""
    upsert(connection, tags, [{"client_id": c, "tag": tag} for c in client_ids for tag in add])
    gone = tags.c.client_id.in_(client_ids) & tags.c.tag.in_(remove)
    connection.execute(delete(tags).where(gone))
