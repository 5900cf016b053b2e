"""Statements that every batch carries out: put into SQL once, then given their rows as they are.

SQLAlchemy looks at each value of each row on its way, for types that the driver would not know. Ours it
knows (text, numbers, bytes), and that takes longer than the database itself. Errors, transactions and the
connection are SQLAlchemy's as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, CursorResult

from anabranch.server.store.rows import Row

Values = Callable[[Row], Any]  # of a row, as the driver takes them


class Statement:
    """One of SQLAlchemy's, for rows that have all its values by name."""

    def __init__(self, clause: Any) -> None:
        self._clause = clause
        self._compiled: dict[tuple[str, tuple[str, ...]], tuple[str, Values]] = {}

    def many(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Carry it out for each row, of which the first has all names; for none of them nothing."""
        if rows:
            sql, values = self._for(connection, rows[0])
            connection.exec_driver_sql(sql, [values(row) for row in rows])

    def one(self, connection: Connection, row: Row) -> CursorResult[Any]:
        """Carry it out for one row; returns what it finds."""
        sql, values = self._for(connection, row)
        return connection.exec_driver_sql(sql, values(row))

    def _for(self, connection: Connection, row: Row) -> tuple[str, Values]:
        key = connection.dialect.name, tuple(row)
        if (known := self._compiled.get(key)) is None:
            known = self._compiled[key] = self._in_sql(connection, list(row))
        return known

    def _in_sql(self, connection: Connection, names: list[str]) -> tuple[str, Values]:
        compiled = self._clause.compile(dialect=connection.dialect, column_keys=names)
        places, fixed = compiled.positiontup, compiled.params
        if places is None:  # by name, and with what the clause says itself
            said = {name: value for name, value in fixed.items() if name not in names}
            return str(compiled), lambda row: {**said, **row}
        if all(name in names for name in places):
            pick = itemgetter(*places)
            return str(compiled), pick if len(places) > 1 else lambda row: (pick(row),)
        return str(compiled), lambda row: tuple(row[n] if n in row else fixed[n] for n in places)
