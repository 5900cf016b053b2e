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
from anabranch.server.store import rows
from anabranch.server.store.base import Entry, Projection
from anabranch.server.store.packs import PackPlace
from anabranch.server.store.projections import PROJECTED, upsert, write_projections
from anabranch.server.store.schema import clients, events, mask_sums, updates
from anabranch.server.store.segments import LoggedEvent
from anabranch.server.store.statements import Statement

AT_ONCE = 512  # events

_LEAN = (Granted, LeaseEnded, Decided)  # effects of which all is written, and that hold no vector
_NO_VECTOR = np.zeros(0, np.float32)

Placed = tuple[int, Entry, PackPlace | None]  # an event's number, and where its payload lies
# Written once: to write a statement costs more than to carry it out.
_INSERT_EVENTS, _INSERT_UPDATES = Statement(insert(events)), Statement(insert(updates))
_INSERT_SUMS = Statement(insert(mask_sums))


def write_events(connection: Connection, placed: Sequence[Placed], projections: Sequence[Projection]) -> None:
    """Write the rows of events, and then what came of them or of earlier ones."""
    reach("rows_begun")
    _insert(connection, placed)
    reach("rows_written")
    write_projections(connection, projections)
    reach("projections_written")


def _insert(connection: Connection, placed: Sequence[Placed]) -> None:
    """The rows of events, and of what came with them."""
    if not placed:
        return
    _INSERT_EVENTS.many(connection, [rows.event_row(seq, entry) for seq, entry, _ in placed])
    arrived = [each for each in placed if rows.update_id_of(each[1]) is not None]
    _INSERT_UPDATES.many(connection, [rows.update_row(*each) for each in arrived])
    sums = [each for each in placed if rows.is_mask_sum(each[1])]
    _INSERT_SUMS.many(connection, [rows.mask_sum_row(*each) for each in sums])
    enrolled = [rows.client_row(entry.record) for _, entry, _ in placed if entry.record["kind"] == "enrolled"]
    upsert(connection, clients, enrolled, replaced=("capability", "seen_at"))


def placed(event: LoggedEvent) -> Placed:
    """An event of the log, as rows are made of it. Raises `ValueError`."""
    return event.seq, Entry.of_line(event.line), event.place


def in_pieces(logged: Iterable[LoggedEvent]) -> Iterator[list[Placed]]:
    """Events of the log, so many at a time as are written at once."""
    logged = iter(logged)
    while piece := [placed(event) for event in islice(logged, AT_ONCE)]:
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
        self._placed: list[Placed] = []
        self._projections: list[Projection] = []
        self.update_ids: set[str] = set()

    @property
    def is_due(self) -> bool:
        """Whether it is time to write the rows."""
        return len(self._placed) >= AT_ONCE

    def add(self, entries: Sequence[Placed], projections: Sequence[Projection]) -> None:
        """Events that are durable, and what came of earlier ones."""
        # A payload has its place in the log by now, or is a file: its bytes are let go.
        self._placed += [(seq, entry.logged(), place) for seq, entry, place in entries]
        self._projections += map(lean, projections)
        self.update_ids.update(i for _, e, _ in entries if (i := rows.update_id_of(e)) is not None)

    def __bool__(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._placed or self._projections)

    def write(self, connection: Connection, projections: Sequence[Projection]) -> None:
        """Write all of it, and these as well; `clear` comes after the commit."""
        write_events(connection, self._placed, [*self._projections, *projections])

    def clear(self) -> None:
        """The rows have it now."""
        self._placed, self._projections, self.update_ids = [], [], set()
