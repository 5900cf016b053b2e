"""Replay: a log's events through an engine once more, whosever log it is. The same log gives the same digest.

A record has its place in the log, which counts from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from anabranch.core import events as ev
from anabranch.core.effects import Decided, Effect
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import ReplayMismatch
from anabranch.core.journal import LoadDelta, Record, from_record
from anabranch.core.model.updates import Receipt
from anabranch.host.rollback import Numbered, Refolder

Replayed = Iterator[tuple[int, Record, list[Effect]]]
Refold = Callable[[ev.RolledBack, int, Engine], ev.RolledBack]


def replay(
    engine: Engine, records: Numbered, load_delta: LoadDelta, refold: Refold | None = None
) -> Replayed:
    """Feed the records to the engine, yielding each with its effects; `refold` is for rollbacks.

    Raises `ReplayMismatch` where a record cannot be read as an event, or is a rollback without `refold`.
    """
    for seq, record in records:
        try:
            event = from_record(record, engine.spec, load_delta)
        except (KeyError, TypeError, ValueError) as error:
            raise ReplayMismatch(f"event {seq} of the log cannot be read: {error!r}") from error
        if isinstance(event, ev.RolledBack):
            if refold is None:
                raise ReplayMismatch(f"event {seq} of the log is a rollback: it needs the whole log")
            event = refold(event, seq, engine)
        yield seq, record, engine.handle(event)


def replay_whole(
    engine: Engine,
    fresh: Callable[[], Engine],
    records: Callable[[int], Numbered],
    load_delta: LoadDelta,
) -> Replayed:
    """The same of a log that is kept whole, and by itself: `records` gives it after a place.

    `engine` is as `fresh` makes it. What updates were told comes of the replay. Raises as `replay` does.
    """
    told: dict[str, Receipt] = {}  # the engine forgets the oldest
    refold = Refolder(fresh, records, load_delta, told.get)
    for seq, record, effects in replay(engine, records(0), load_delta, refold):
        told |= {e.receipt.update_id: e.receipt for e in effects if isinstance(e, Decided)}
        yield seq, record, effects
