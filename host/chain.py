"""A run's log as a chain of hashes (`identity.heads`), and what is decided by it.

A version's head names it: two histories share no head, though they have the same numbers. The mark says how
far the log had come when somebody was last answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from anabranch.core.effects import Effect, Published
from anabranch.core.journal import Record, line
from anabranch.identity.heads import next_head

HEADS_KEPT = 4096  # the newest are at hand


@dataclass(frozen=True)
class ChainLink:
    """A version's place in the chain of hashes, hex: see `identity.heads`."""

    link: str
    head: str


@dataclass(frozen=True)
class Mark:
    """How far the log of a run had come when it was last acknowledged: its last event, and all up to there.

    `head`: `HashChain.mark`, hex.
    """

    run_id: str
    seq: int
    head: str

    def lost(self, end: int) -> int:
        """How many acknowledged events a log lacks that ends at event `end`."""
        return max(0, self.seq - end)

    def contradicts(self, chain: HashChain, seq: int) -> bool:
        """Whether the log up to event `seq`, where the mark is, is another than the acknowledged one.

        A mark of another event says nothing of this one.
        """
        return self.seq == seq and chain.mark(seq) != self


class HashChain:
    """Of a run at a version with this `head`, hex. `origin` stands for what the run is fixed by.

    Give it every event of the log, in order, and tell it of every version.
    """

    def __init__(self, run_id: str, origin: str, head: str, version: int = 0) -> None:
        self._run_id, self._origin = run_id, origin
        self.version = version
        self._heads = {version: head}
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

    def add(self, record: Record | str) -> None:
        """An event is in the log: its record, or the canonical line of that where it was made already."""
        text = record if isinstance(record, str) else line(record)
        self._lines.update(text.encode() + b"\n")

    def publish(self, version: int) -> ChainLink:
        """The event that was added last has published a version."""
        link = self._lines.digest()
        head = next_head(self.head, link)
        self.version, self._lines = version, hashlib.sha256()
        self._heads[version] = head
        if len(self._heads) > HEADS_KEPT:
            del self._heads[next(iter(self._heads))]
        return ChainLink(link.hex(), head)

    def follow(self, record: Record | str, effects: Iterable[Effect]) -> dict[int, ChainLink]:
        """An event is in the log, and has had these effects: the links of the versions that it published."""
        self.add(record)
        return {e.version: self.publish(e.version) for e in effects if isinstance(e, Published)}

    def copy(self) -> HashChain:
        """One that goes on by itself."""
        made = HashChain(self._run_id, self._origin, self.head, self.version)
        made._heads, made._lines = dict(self._heads), self._lines.copy()
        return made


def is_base(held: str, wanted: str) -> bool:
    """Whether what is held under this head is the version that is wanted. A number alone is no name.

    An empty `wanted` is of a server, or a task, that does not know: then the number has to do.
    """
    return wanted in ("", held)


def is_of_other_base(said: str, known: str | None) -> bool:
    """Whether an update was trained from a version of a lost history, if its device says from which."""
    return bool(said) and known is not None and known != said
