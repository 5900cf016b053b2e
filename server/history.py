"""The chain of a run's versions (`identity.heads`), kept in step with the log."""

from __future__ import annotations

import hashlib

from anabranch.core.journal import Record, line
from anabranch.identity.heads import first_head, follow_links, next_head
from anabranch.server.store.base import Link, Mark, RunInfo, Store

HEADS_KEPT = 4096  # the newest are at hand, older ones are in the store


class History:
    """Of a run at a version, 0 unless told otherwise; then `head` is that version's, hex.

    Give it every event of the log, in order, and tell it of every version.
    """

    def __init__(self, info: RunInfo, version: int = 0, head: str = "") -> None:
        fixed = {"config": info.config, "initial_sha256": info.initial_sha256, "layout": info.layout}
        fixed["run_id"] = self._run_id = info.run_id
        # A history may be taken up from a version's head, which does not show what the run's row says now.
        self._origin = first_head({**fixed, "created_at": info.created_at})
        self.version = version
        self._heads = {version: head or first_head(fixed)}
        self._lines = hashlib.sha256()

    @property
    def head(self) -> str:
        """The newest version's."""
        return self._heads[self.version]

    def mark(self, seq: int) -> Mark:
        """How far the log has come, with event `seq` as the last one.

        Its head is of what the run is fixed by, and of every event, those after the newest version as well.
        """
        head = next_head(next_head(self._origin, bytes.fromhex(self.head)), self._lines.digest())
        return Mark(self._run_id, seq, head)

    def head_of(self, version: int) -> str | None:
        """A version's head, None where it is not at hand."""
        return self._heads.get(version)

    def add(self, record: Record) -> None:
        """An event is in the log."""
        self._lines.update(line(record).encode() + b"\n")

    def publish(self, version: int) -> Link:
        """The event that was added last has published a version."""
        link = self._lines.digest()
        head = next_head(self.head, link)
        self.version, self._lines = version, hashlib.sha256()
        self._heads[version] = head
        if len(self._heads) > HEADS_KEPT:
            del self._heads[next(iter(self._heads))]
        return Link(link.hex(), head)


def head_at(store: Store, version: int) -> str | None:
    """A version's head, whether the log still has it or not; None for those of before there was a chain."""
    row = next(iter(store.versions(after=version - 1, limit=1)), None) if version else None
    if row is not None and row.version == version:
        return row.head
    links, info = store.links(0, version), store.info()
    if len(links) < version or info is None:
        return None
    return follow_links(History(info).head, bytes.fromhex("".join(links)))


def history_at(store: Store, info: RunInfo, version: int, seq: int) -> History:
    """The chain when event `seq` was the last and `version` the newest.

    From the head on record and the events after it; where there is none, from the whole log.
    """
    row = next(iter(store.versions(after=version - 1, limit=1)), None) if version else None
    if row is not None and row.head is not None:
        history, start, published = History(info, version, row.head), row.seq, {}
    else:
        history, start = History(info), 0
        rows = store.versions(limit=version) if version else []
        published = {row.seq: row.version for row in rows}
    for number, record in store.records(start):
        if number > seq:
            break
        history.add(record)
        if number in published:
            history.publish(published[number])
    return history
