"""What the register says of certificates, kept at hand: nobody who writes to it holds up who only asks.

The register is a SQLite file with a rollback journal: a write-ahead log would hold on one machine alone, and
a leader and its standby may share the register on a disk of both. So whoever writes there locks out readers,
for as long as it likes. Until it commits, what was read before still holds, and the file's own counter of
commits, which needs no lock, says whether anybody has.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from anabranch.core.errors import StoreError
from anabranch.identity.register import RegisterPoint, check_same_file, standing_of

KEPT_MAX = 100_000  # those that were asked for last
AGAIN_AT_ONCE = 200  # others that are asked for again with each look after a commit
COUNTER = slice(24, 28)  # of commits, in the header of a SQLite file

_GOOD = (
    "SELECT serial FROM certificates WHERE revoked_at IS NULL AND expires_at > ? ORDER BY rowid DESC LIMIT ?"
)


class Standings:
    """What the register says of certificates, at hand while somebody writes to it.

    For one thread at a time. Raises `StoreError` where the file fails.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Kept open: to close any descriptor of a file lets go of all locks that a process has on it.
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._inode = os.fstat(self._file).st_ino
        self._connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        self._known: dict[str, str] = {}  # those asked for last are last
        self._stale: set[str] = set()  # known of before the newest commit that was seen
        self._version, self._counter = -1, b""
        self.point = RegisterPoint()  # how far the register has come, as far as was seen
        # Told of it before anybody is answered by it, again and again until it says that it has noted it.
        self.note: Callable[[RegisterPoint], bool] | None = None
        self._noted: RegisterPoint | None = None

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()
        os.close(self._file)

    def read_ahead(self, now: float) -> None:
        """Know all that are good, as far as there is room: the newest."""
        try:
            self._look([])
            found = self._ask(_GOOD, now, KEPT_MAX)
        except sqlite3.Error as error:
            if not _is_busy(error):
                raise self._failed(error) from error
        else:
            self._known = {serial: "good" for (serial,) in reversed(found)}

    def at_hand(self, serial: str) -> str | None:
        """What `of` would say, where nobody has written since the newest look; None where it must be asked.

        From any thread. It only reads, and in this order: `_look` names a commit when all before it is stale.
        """
        try:
            if self._commits() != self._counter or self._path.stat().st_ino != self._inode:
                return None
        except (StoreError, OSError):
            return None
        return None if serial in self._stale else self._known.get(serial)

    def of(self, serials: Collection[str]) -> dict[str, str | None]:
        """`good`, `revoked` or `unknown`; None where that cannot be told before somebody else has written."""
        check_same_file(self._path, self._inode)
        try:
            self._look(serials)
        except sqlite3.Error as error:
            if not _is_busy(error):
                raise self._failed(error) from error
            if self._commits() != self._counter:
                return dict.fromkeys(serials)
        return {serial: None if serial in self._stale else self._known.get(serial) for serial in serials}

    @property
    def behind(self) -> int:
        """How many are known of before the newest commit alone."""
        return len(self._stale)

    def _look(self, serials: Collection[str]) -> None:
        """Ask for those that are not known as of now, and for some more."""
        counter = self._commits()  # first: of what comes in between nothing is taken for known
        ((version,),) = self._ask("PRAGMA data_version")
        if version != self._version:
            self._check_newer()
            self._stale = set(self._known)
        if self.note is not None and self._noted != self.point and self.note(self.point):
            self._noted = self.point
        self._version, self._counter = version, counter
        asked = [serial for serial in serials if serial not in self._known or serial in self._stale]
        for serial in [*asked, *sorted(self._stale.difference(asked))[:AGAIN_AT_ONCE]]:
            standing = standing_of(serial, self._ask)
            self._known.pop(serial, None)
            self._known[serial] = standing
            self._stale.discard(serial)
        while len(self._known) > KEPT_MAX:
            self._stale.discard(oldest := next(iter(self._known)))
            del self._known[oldest]

    def _check_newer(self) -> None:
        """Raises `StoreError` where a backup was copied over it: who was revoked since is good there.

        `admin ca restored` changes that with the next start alone: they are not revoked again yet.
        """
        now = RegisterPoint.of(self._ask)
        said = self._version != -1 and now.age > self.point.age
        if (why := self.point.lost_by(now, self._ask)) or said:
            raise StoreError(
                f"{self._path} was taken back to an older one under the server: stop it, say so with "
                "`anabranch admin ca restored`, revoke again whom that one takes for good, and start it"
                f"{why and f' ({why})'}"
            )
        self.point = now

    def _ask(self, query: str, *values: str | float) -> Sequence[Any]:
        return self._connection.execute(query, values).fetchall()

    def _commits(self) -> bytes:
        try:
            return os.pread(self._file, COUNTER.stop, 0)[COUNTER]
        except OSError as error:
            raise StoreError(f"{self._path} cannot be read: {error.strerror}") from error

    def _failed(self, error: sqlite3.Error) -> StoreError:
        return StoreError(f"{self._path} cannot be read: {error}")


def _is_busy(error: sqlite3.Error) -> bool:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF == sqlite3.SQLITE_BUSY
