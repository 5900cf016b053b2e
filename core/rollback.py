"""Rollback: the state that the log gives when the updates of some clients after a version are left out.

Nothing in the log is taken back. A rollback is an event like any other, and the version that it publishes has
the next number, so nobody ever sees two models under one number. What it publishes is defined by the log:

    the fold of all events before it, in which every update that this rollback or an earlier one leaves out is
    rejected on arrival, and every other update has the verdict `rejected` exactly if it was told so

An update of client c is left out by a rollback to version v, `without` c, if its place in the log is after
the event that published v and before the rollback. So several rollbacks add up.

In the fold versions have other numbers than they had, because fewer updates make fewer versions. An update
belongs to its task there: its base is the version that the task was granted with in the fold. Admission is
not decided anew, since its bounds (`guard.py`) do not touch the model; rounds cannot be folded anew, since
their cohorts were drawn for the versions that there were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anabranch.core import events as ev
from anabranch.core.journal import LoadDelta, Record, from_record
from anabranch.core.updates import Receipt, Verdict

if TYPE_CHECKING:
    from anabranch.core.engine import Engine

LEFT_OUT = "left out by a rollback"
Numbered = Iterable[tuple[int, Record]]


@dataclass(frozen=True)
class Refolder:
    """Makes the state of a rollback.

    `fresh` makes the engine of version 0; `records` starts the log from its beginning, as (seq, record) from
    seq 1; `receipt` is what an update was told, where the engine has forgotten it.
    """

    fresh: Callable[[], Engine]
    records: Callable[[], Numbered]
    load_delta: LoadDelta
    receipt: Callable[[str], Receipt | None] = lambda _: None

    def __call__(self, event: ev.RolledBack, seq: int, engine: Engine) -> ev.RolledBack:
        """The event with its state; `seq` is its place in the log, `engine` the one it is for.

        The new engine shares nothing with the old.
        """
        orders = [(event, seq), *self._earlier(seq)]
        fold = self.fresh()
        fold.settings = replace(
            fold.settings, buffer_max=0, window_max=0, tasks_per_minute=0.0, flaws_max=0, staleness_max=0
        )
        for place, record in self._before(seq):
            if record["kind"] == "rolled_back":
                for client_id in record["without"]:
                    fold.handle(ev.Quarantined(record["now"], client_id, LEFT_OUT))
            elif record["kind"] == "update":
                fold.handle(self._update(record, fold, engine, _is_left_out(record, place, orders)))
            else:
                fold.handle(from_record(record, fold.spec, self.load_delta))
        return replace(event, fold=fold)

    def _before(self, seq: int) -> Iterator[tuple[int, Record]]:
        for place, record in self.records():
            if place >= seq:
                return
            yield place, record

    def _earlier(self, seq: int) -> Iterator[tuple[ev.RolledBack, int]]:
        for place, record in self._before(seq):
            if record["kind"] == "rolled_back":
                without = tuple(record["without"])
                yield ev.RolledBack(record["now"], record["to_version"], record["to_seq"], without), place

    def _update(self, record: Record, fold: Engine, engine: Engine, left_out: bool) -> ev.Event:
        """An update as the fold takes it: of its task's base, or rejected."""
        told = engine.ledger.receipts.get(record["update_id"]) or self.receipt(record["update_id"])
        if left_out or (told is not None and told.decision.verdict is Verdict.REJECTED):
            return from_record({**record, "flaw": record["flaw"] or LEFT_OUT}, fold.spec, self.load_delta)
        task = fold.ledger.tasks.get(record["task_id"])
        base = record["base_version"] if task is None else task.base_version
        return from_record({**record, "base_version": base}, fold.spec, self.load_delta)


def _is_left_out(record: Record, place: int, orders: Iterable[tuple[ev.RolledBack, int]]) -> bool:
    return any(o.to_seq < place < seq and record["client_id"] in o.without for o, seq in orders)
