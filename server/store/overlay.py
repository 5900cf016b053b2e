"""What the log has and the rows do not, for a process that only reads: views that stand before the tables.

What a table's name gives is then its rows and those that the end of the log comes to. Nothing is written but
temporary tables. The server's writer has no need of them: it writes the rows before it asks for any.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, column, delete, insert, table

from anabranch.core.errors import LogLost
from anabranch.server.store import rows
from anabranch.server.store.ending import log_end
from anabranch.server.store.following import Placed, in_pieces
from anabranch.server.store.schema import events, mask_sums, updates
from anabranch.server.store.segments import LoggedEvent, Segments

TABLES = (events, updates, mask_sums)
_BEHIND = {
    of.name: table(f"behind_{of.name}", *(column(c.name) for c in of.columns), schema="temp") for of in TABLES
}
_TABLE = "CREATE TEMP TABLE behind_{0} AS SELECT * FROM main.{0} WHERE 0"
# The server may have written the rows since: they count.
_VIEW = """CREATE TEMP VIEW {0} AS SELECT * FROM main.{0}
UNION ALL SELECT * FROM temp.behind_{0} WHERE seq > COALESCE((SELECT max(seq) FROM main.events), 0)"""
_INDEX = "CREATE INDEX temp.behind_by_{0} ON behind_updates ({0})"


class Overlay:
    """Of one connection. `size`: so many events; `flaw`: why the log cannot be read further, if so."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._state: object = None
        self._is_begun = False
        self.size = 0
        self.flaw: LogLost | None = None

    def lay(self, connection: Connection, run_id: str) -> None:
        """See to it that all of the log is there, in a transaction of its own. Raises `StoreCorrupt`."""
        state = run_id, self._segments.state()
        if state == self._state or (not self._is_begun and not state[1]):
            return
        if self._is_begun:
            connection.exec_driver_sql("PRAGMA query_only=OFF")
            for behind in _BEHIND.values():
                connection.execute(delete(behind))
        end, self.size, self.flaw = self._end(connection), 0, None
        for piece in in_pieces(self._whole(run_id, end)):
            if not self._is_begun:
                self._begin(connection)
            self._put(connection, piece)
            self.size += len(piece)
        connection.exec_driver_sql("PRAGMA query_only=ON")
        self._state = state

    def forget(self) -> None:
        """The connection is another one from now on."""
        self._state, self._is_begun, self.size = None, False, 0

    def _end(self, connection: Connection) -> int:
        if not self._is_begun:
            return log_end(connection)
        return int(connection.exec_driver_sql("SELECT COALESCE(max(seq), 0) FROM main.events").scalar_one())

    def _whole(self, run_id: str, end: int) -> Iterator[LoggedEvent]:
        try:
            yield from self._segments.events(self._segments.needed(run_id, end), end)
        except LogLost as lost:
            self.flaw = lost

    def _begin(self, connection: Connection) -> None:
        connection.exec_driver_sql("PRAGMA query_only=OFF")
        for name in _BEHIND:
            connection.exec_driver_sql(_TABLE.format(name))
            connection.exec_driver_sql(_VIEW.format(name))
        for name in ("update_id", "sha256"):
            connection.exec_driver_sql(_INDEX.format(name))
        self._is_begun = True

    def _put(self, connection: Connection, piece: list[Placed]) -> None:
        arrived = [each for each in piece if rows.update_id_of(each[1]) is not None]
        sums = [each for each in piece if rows.is_mask_sum(each[1])]
        for of, found in (
            (events, [rows.event_row(seq, entry) for seq, entry, _ in piece]),
            (updates, [rows.update_row(*each) for each in arrived]),
            (mask_sums, [rows.mask_sum_row(*each) for each in sums]),
        ):
            if found:
                connection.execute(insert(_BEHIND[of.name]), found)
