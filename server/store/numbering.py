"""Which place in the log an entry gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import cache

from sqlalchemy import Connection, bindparam, select

from anabranch.server.store.base import Entry
from anabranch.server.store.rows import update_id_of
from anabranch.server.store.schema import updates
from anabranch.server.store.sqlite import SqliteDatabase
from anabranch.server.store.statements import Statement


def numbered(
    stored: Callable[[list[str]], set[str]],
    entries: Sequence[Entry],
    last_seq: int,
    behind: AbstractSet[str] = frozenset(),
) -> list[int | None]:
    """The next sequence number for each entry; None for an update that is in the log.

    `stored`: which of these updates have a row. `behind`: those that are in the log, and in no row yet.
    """
    ids = [i for e in entries if (i := update_id_of(e)) is not None]
    known: set[str] = {i for i in ids if i in behind}
    if ids:
        known |= stored(ids)
    seqs: list[int | None] = []
    seq = last_seq
    for entry in entries:
        update_id = update_id_of(entry)
        if update_id in known:
            seqs.append(None)
            continue
        if update_id is not None:
            known.add(update_id)
        seq += 1
        seqs.append(seq)
    return seqs


def stored_ids(connection: Connection, ids: list[str]) -> set[str]:
    """Which of these updates have a row, in a transaction."""
    row = {f"id_{n}": update_id for n, update_id in enumerate(ids)}
    return set(_logged(len(ids)).one(connection, row).scalars())


def ids_in_sqlite(database: SqliteDatabase, ids: list[str]) -> set[str]:
    """The same in SQLite, without a transaction: every batch asks, and few have anything there."""
    places = ", ".join("?" * len(ids))
    query = f"SELECT update_id FROM updates WHERE update_id IN ({places})"  # noqa: S608 - no values
    return {update_id for (update_id,) in database.look(query, ids)}


@cache  # a batch has a bounded number of events
def _logged(count: int) -> Statement:
    """Which of so many ids are of updates in the log."""
    ids = [bindparam(f"id_{n}", type_=updates.c.update_id.type) for n in range(count)]
    return Statement(select(updates.c.update_id).where(updates.c.update_id.in_(ids)))
