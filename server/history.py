"""The chain of a run's versions (`identity.heads`), kept in step with the log."""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.host.chain import HashChain
from anabranch.identity.heads import first_head, follow_links
from anabranch.server.store.base import RunInfo, Store, VersionRow


class History(HashChain):
    """Of a run at a version, 0 unless told otherwise; then `head` is that version's, hex. See `HashChain`."""

    def __init__(self, info: RunInfo, version: int = 0, head: str = "") -> None:
        fixed = {"config": info.config, "initial_sha256": info.initial_sha256, "layout": info.layout}
        fixed["run_id"] = info.run_id
        # A history may be taken up from a version's head, which does not show what the run's row says now.
        origin = first_head({**fixed, "created_at": info.created_at})
        super().__init__(info.run_id, origin, head or first_head(fixed), version)


def row_of(store: Store, version: int) -> VersionRow | None:
    """What is on record of a version; None of version 0, and where the log has it no more."""
    row = next(iter(store.versions(version - 1, 1)), None) if version else None
    return row if row is not None and row.version == version else None


def head_at(store: Store, version: int) -> str | None:
    """A version's head, whether the log still has it or not; None for those of before there was a chain."""
    if (row := row_of(store, version)) is not None:
        return row.head
    links, info = store.links(0, version), store.info()
    if len(links) < version or info is None:
        return None
    return follow_links(History(info).head, bytes.fromhex("".join(links)))


def rows_after(store: Store, version: int = 0) -> Iterator[VersionRow]:
    """The versions on record above one, in order, a page of them in memory."""
    while page := store.versions(version):
        yield from page
        version = page[-1].version


def history_at(store: Store, info: RunInfo, version: int, seq: int) -> History:
    """The chain when event `seq` was the last and `version` the newest.

    From the head on record and the events after it; where there is none, from the whole log.
    """
    row = row_of(store, version)
    if row is not None and row.head is not None:
        return gone_on(History(info, version, row.head), store, row.seq, seq)
    return gone_on(History(info), store, 0, seq)


def gone_on(history: History, store: Store, after: int, seq: int) -> History:
    """The same chain, of a log up to event `after`, with the events up to `seq` and the versions of these."""
    rows = rows_after(store, history.version)
    row = next(rows, None)
    for number, record in store.records(after):
        if number > seq:
            break
        history.add(record)
        while row is not None and row.seq <= number:
            if row.seq == number:
                history.publish(row.version)
            row = next(rows, None)
    return history
