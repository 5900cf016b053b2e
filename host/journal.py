"""Replay: a log's events through an engine once more, whosever log it is. The same log gives the same digest.

A record has its place in the log, which counts from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from anabranch.core import events as ev
from anabranch.core.effects import Decided, Effect
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import UPGRADE, ReplayMismatch, StoreNewer
from anabranch.core.journal import LoadDelta, Record, from_record
from anabranch.core.model.updates import Receipt
from anabranch.core.plain import FieldError, UnknownField
from anabranch.host.build import Begin
from anabranch.host.log import Log, Recovery
from anabranch.host.rollback import Refolder
from anabranch.host.submission import loader

Replayed = Iterator[tuple[int, Record, list[Effect]]]
Refold = Callable[[ev.RolledBack, int, Engine], ev.RolledBack]


def replay(
    engine: Engine, records: Iterable[tuple[int, Record]], load_delta: LoadDelta, refold: Refold | None = None
) -> Replayed:
    """Feed the records to the engine, yielding each with its effects; `refold` is for rollbacks.

    Raises `ReplayMismatch` where a record cannot be read as an event, or is a rollback without `refold`, and
    `StoreNewer` for one of a newer release.
    """
    for seq, record in records:
        try:
            event = from_record(record, engine.spec, load_delta)
        except UnknownField as error:
            raise StoreNewer(f"event {seq} of the log {error}: {UPGRADE}") from error
        except FieldError as error:
            raise ReplayMismatch(f"event {seq} of the log cannot be read: {error}") from error
        if isinstance(event, ev.RolledBack):
            if refold is None:
                raise ReplayMismatch(f"event {seq} of the log is a rollback: it needs the whole log")
            event = refold(event, seq, engine)
        yield seq, record, engine.handle(event)


class Replay:
    """A log once more: iterate, and `engine` has handled what was yielded, beginning where `found` is.

    That is the log's first event unless told otherwise. `receipt` knows what updates were told; without it
    that comes of the replay. Raises as `replay` does.
    """

    def __init__(
        self,
        log: Log,
        begin: Begin,
        found: Recovery | None = None,
        receipt: Callable[[str], Receipt | None] | None = None,
    ) -> None:
        self._found = log.first() if found is None else found
        self.engine = begin(self._found.snapshot)
        self._told: dict[str, Receipt] = {}  # the engine forgets the oldest
        self._keeps = receipt is None
        self._load_delta = loader(log.payload, self.engine.spec)
        self._refold = Refolder(log, begin, receipt or self._told.get)

    def __iter__(self) -> Replayed:
        for seq, record, effects in replay(self.engine, self._found.tail, self._load_delta, self._refold):
            if self._keeps:
                self._told |= {e.receipt.update_id: e.receipt for e in effects if isinstance(e, Decided)}
            yield seq, record, effects
