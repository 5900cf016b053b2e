"""How far back a log is kept, and from which snapshot it begins then.

A log that is not kept whole begins with a snapshot, its base: whatever is proved, replayed or rolled back is
so from there. The base moves in steps: of the snapshots one is kept as the next base, and once that is as old
as the setting says, the log begins with it. So the log holds what is asked for, and at most twice as much.

The base is never one of the newest two snapshots: if the newest is damaged, the one before has its tail.
And it never lies before a rollback that is in the log, but for the base that the rollback was folded from.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.core.errors import ConfigError

SNAPSHOTS_KEPT = 3
DAY_S = 86_400.0

_FORM = re.compile(r"(all)|(versions|days):([0-9]{1,9})")


@dataclass(frozen=True)
class Keep:
    """`server.keep`: at least so many versions, or days, of the log; all of it where both are 0."""

    versions: int = 0
    days: int = 0

    @classmethod
    def of(cls, text: str) -> Keep:
        """Of "all", "versions:N" or "days:N". Raises `ConfigError`."""
        found = _FORM.fullmatch(text)
        if found is None or (found[2] and not int(found[3])):
            raise ConfigError(
                f"server.keep must be 'all', 'versions:N' or 'days:N' with N of at least 1, not {text!r}"
            )
        return cls() if found[1] else cls(**{found[2]: int(found[3])})

    @property
    def is_all(self) -> bool:
        """Whether nothing is ever dropped."""
        return not (self.versions or self.days)

    def is_behind(self, mark: SnapshotPoint, newest: SnapshotPoint) -> bool:
        """Whether the log may begin with this snapshot."""
        if self.versions:
            return newest.version - mark.version >= self.versions
        return bool(self.days) and newest.at - mark.at >= self.days * DAY_S


ALL = Keep()


@dataclass(frozen=True)
class SnapshotPoint:
    """A snapshot: the last event that it has folded, its version, and its time, in seconds since 1970."""

    seq: int
    version: int
    at: float


@dataclass(frozen=True)
class KeptSnapshots:
    """The snapshots that are kept; `base`: with which the log begins, None for the first event."""

    marks: tuple[SnapshotPoint, ...]
    base: SnapshotPoint | None


def kept(marks: Sequence[SnapshotPoint], keep: Keep, has_base: bool, rolled_back: int = 0) -> KeptSnapshots:
    """Which of the snapshots, oldest first, to keep.

    `has_base`: the log begins with the first of them already. `rolled_back`: the newest rollback's event.
    """
    base, newest = marks[0] if has_base else None, marks[-1]
    for mark in marks[:-2]:
        if mark.version and mark.seq >= rolled_back and keep.is_behind(mark, newest):
            base = mark
    later = [mark for mark in marks if base is None or mark.seq > base.seq]
    next_base = [] if keep.is_all else [mark for mark in later if mark.seq >= rolled_back][:1]
    wanted = {*([base] if base else []), *next_base, *later[-SNAPSHOTS_KEPT:]}
    return KeptSnapshots(tuple(mark for mark in marks if mark in wanted), base)
