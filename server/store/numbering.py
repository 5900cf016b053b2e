"""Which place in the log an entry gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from anabranch.server.store.base import Entry
from anabranch.server.store.rows import update_id_of


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
