"""The rows of events, which follow the log: many at a time, in one commit, and none is waited for.

What is in the log and in no row yet is kept here, so that an update is known from the moment on at which it
is durable. A start reads it again from the segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from sqlalchemy import Connection, insert

from anabranch.core.effects import Decided, Granted, LeaseEnded, Published
from anabranch.server.failpoints import reach
from anabranch.server.store.base import Entry, Projection
from anabranch.server.store.projections import PROJECTED, upsert, write_projections
from anabranch.server.store.rows import LoggedRows, Row, rows_of
from anabranch.server.store.schema import clients, events, mask_sums, updates
from anabranch.server.store.segments import LoggedEvent
from anabranch.server.store.statements import Statement

AT_ONCE = 512  # events that a start or a look takes up at a time
DUE = 128  # events that wait: a batch behind the commit of their rows hardly notices

_LEAN = (Granted, LeaseEnded, Decided)  # effects of which all is written, and that hold no vector
_NO_VECTOR = np.zeros(0, np.float32)

# Written once: to write a statement costs more than to carry it out.
_INSERT_EVENTS, _INSERT_UPDATES = Statement(insert(events)), Statement(insert(updates))
_INSERT_SUMS = Statement(insert(mask_sums))


def write_events(
    connection: Connection, logged: Sequence[LoggedRows], projections: Sequence[Projection]
) -> None:
    """Write the rows of events, and then what came of them or of earlier ones."""
    reach("rows_begun")
    _insert(connection, logged)
    reach("rows_written")
    write_projections(connection, projections)
    reach("projections_written")


def _insert(connection: Connection, logged: Sequence[LoggedRows]) -> None:
    """The rows of events, and of what came with them."""
    if not logged:
        return
    brought = brought_by(logged)
    _INSERT_EVENTS.many(connection, [each.event for each in logged])
    _INSERT_UPDATES.many(connection, brought["update"])
    _INSERT_SUMS.many(connection, brought["mask_sum"])
    upsert(connection, clients, brought["enrolled"], replaced=("capability", "seen_at"))


def brought_by(logged: Sequence[LoggedRows]) -> dict[str, list[Row]]:
    """The rows of what came with events, by the kind of event that brings them."""
    found: dict[str, list[Row]] = {"update": [], "mask_sum": [], "enrolled": []}
    for event, brought in logged:
        if brought is not None:
            found[event["kind"]].append(brought)
    return found


def in_pieces(logged: Iterable[LoggedEvent]) -> Iterator[list[LoggedRows]]:
    """Rows of events of the log, so many at a time as are written at once. Raises `ValueError`."""
    logged = iter(logged)
    while piece := [rows_of(e.seq, Entry.of_line(e.line), e.place) for e in islice(logged, AT_ONCE)]:
        yield piece


def lean(projection: Projection) -> Projection:
    """One that waits: without the vectors of the versions, of which nothing is written."""
    if all(isinstance(effect, _LEAN) for effect in projection.effects):
        return projection
    effects = [
        replace(effect, vector=_NO_VECTOR) if isinstance(effect, Published) else effect
        for effect in projection.effects
        if isinstance(effect, PROJECTED)
    ]
    return replace(projection, effects=effects)


class Following:
    """What the log has and the rows do not. For the writer's thread."""

    def __init__(self) -> None:
        self._logged: list[LoggedRows] = []
        self._projections: list[Projection] = []
        self.update_ids: set[str] = set()

    @property
    def is_due(self) -> bool:
        """Whether it is time to write the rows."""
        return len(self._logged) >= DUE

    def add(self, logged: Sequence[LoggedRows], projections: Sequence[Projection]) -> None:
        """Rows of events that are durable, and what came of earlier ones."""
        self._logged += logged
        self._projections += map(lean, projections)
        self.update_ids.update(i for each in logged if (i := each.update_id) is not None)

    def __bool__(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._logged or self._projections)

    def write(self, connection: Connection, projections: Sequence[Projection]) -> None:
        """Write all of it, and these as well; `clear` comes after the commit."""
        write_events(connection, self._logged, [*self._projections, *projections])

    def clear(self) -> None:
        """The rows have it now."""
        self._logged, self._projections, self.update_ids = [], [], set()
