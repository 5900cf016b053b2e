"""What the log has and the rows do not, for a process that only reads: views that stand before the tables.

What a table's name gives is then its rows and those that the end of the log comes to. Nothing is written but
temporary tables. The server's writer has no need of them: it writes the rows before it asks for any.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, column, delete, insert, table

from anabranch.core.errors import LogLost
from anabranch.server.store.ending import rows_end
from anabranch.server.store.following import brought_by, in_pieces
from anabranch.server.store.rows import LoggedRows
from anabranch.server.store.schema import events, mask_sums, updates
from anabranch.server.store.segments import LoggedEvent, Segments, State

TABLES = (events, updates, mask_sums)
_BEHIND = {
    of.name: table(f"behind_{of.name}", *(column(c.name) for c in of.columns), schema="temp") for of in TABLES
}
_TABLE = "CREATE TEMP TABLE IF NOT EXISTS behind_{0} AS SELECT * FROM main.{0} WHERE 0"
# The server may have written the rows since: they count.
_VIEW = """CREATE TEMP VIEW IF NOT EXISTS {0} AS SELECT * FROM main.{0}
UNION ALL SELECT * FROM temp.behind_{0} WHERE seq > COALESCE((SELECT max(seq) FROM main.events), 0)"""
_INDEX = "CREATE INDEX IF NOT EXISTS temp.behind_by_{0} ON behind_updates ({0})"


class Overlay:
    """Of one connection. `size`: so many events; `flaw`: why the log cannot be read further, if so.

    `rows_end`: the last event that had a row at the last look.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._state: State = ()
        self._is_begun = self._is_broken = False
        self._last = self.rows_end = 0
        self.flaw: LogLost | None = None

    def lay(self, connection: Connection, run_id: str) -> None:
        """See to it that all of the log is there, in a transaction of its own. Raises `StoreCorrupt`."""
        state = self._segments.state()
        if state == self._state or (not self._is_begun and not state):
            return
        before, self._state = self._state, ()  # nothing is known of what a look that fails leaves
        connection.exec_driver_sql("PRAGMA query_only=OFF")
        self.rows_end = rows_end(connection)
        try:
            self._clear(connection, is_grown=_is_grown(before, state))
            self.flaw = None
            for piece in in_pieces(self._whole(run_id, self._last)):
                if not self._is_begun:
                    self._begin(connection)
                self._put(connection, piece)
                self._last = piece[-1].seq
        except BaseException:
            self._is_broken = True
            raise
        connection.exec_driver_sql("PRAGMA query_only=ON")
        self._state = state

    @property
    def size(self) -> int:
        """So many events are here and in no row."""
        return self._last - self.rows_end

    def look_again(self) -> None:
        """With the next call of `lay`, though nothing seems to be new."""
        self._state = ()

    def forget(self) -> None:
        """The connection is another one from now on."""
        self._state, self._is_begun, self._is_broken = (), False, False
        self._last, self.rows_end, self.flaw = 0, 0, None

    def _clear(self, connection: Connection, is_grown: bool) -> None:
        """Keep what is laid and in no row yet, if the log has only grown since."""
        if not is_grown:
            self._last = 0
        if self._is_broken:  # some of the tables may be there, or be gone with a transaction
            self._begin(connection)
        if self._is_begun:
            for behind in _BEHIND.values():
                which = delete(behind)
                connection.execute(which.where(behind.c.seq <= self.rows_end) if is_grown else which)
        self._last = max(self._last, self.rows_end)

    def _whole(self, run_id: str, end: int) -> Iterator[LoggedEvent]:
        try:
            yield from self._segments.events(self._segments.needed(run_id, end), end)
        except LogLost as lost:
            self.flaw = lost

    def _begin(self, connection: Connection) -> None:
        for name in _BEHIND:
            connection.exec_driver_sql(_TABLE.format(name))
            connection.exec_driver_sql(_VIEW.format(name))
        for name in ("update_id", "sha256"):
            connection.exec_driver_sql(_INDEX.format(name))
        self._is_begun, self._is_broken = True, False

    def _put(self, connection: Connection, piece: list[LoggedRows]) -> None:
        brought = brought_by(piece)
        for of, found in (
            (events, [each.event for each in piece]),
            (updates, brought["update"]),
            (mask_sums, brought["mask_sum"]),
        ):
            if found:
                connection.execute(insert(_BEHIND[of.name]), found)


def _is_grown(before: State, now: State) -> bool:
    """Whether the newest segment is the same, and has at least what it had: then nothing was taken back."""
    if not (before and now):
        return False
    return before[-1][0] == now[-1][0] and before[-1][1] <= now[-1][1]
