"""What takes long of an update, done beside the writer's thread: meanwhile asks and heartbeats pass it.

An update whose long part is being made is not in the log yet, nor is what came behind it, but for asks,
heartbeats and enrolments of other devices, leases that end, and looks: these are logged and answered at once.
So the log has them in the order in which they were decided, and a replay, which makes nothing beforehand,
gives the same. What was passed happens, by the log, no earlier than what has passed it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import TYPE_CHECKING

from anabranch.core import events as ev
from anabranch.core.engine.beforehand import Beforehand, LongPart
from anabranch.core.engine.engine import Engine

if TYPE_CHECKING:
    from anabranch.server.books import Call

log = logging.getLogger(__name__)

VALUES_MIN = 1 << 20  # of a model: what is done for fewer takes no longer than a commit


class LongParts:
    """For the writer's thread. Without an `executor` nothing is made beforehand.

    `made` is called, in any thread, when a long part is there.
    """

    def __init__(self, engine: Engine) -> None:
        self.executor: Executor | None = None
        self.made: Callable[[], None] = lambda: None
        self._engine = engine
        self._work: tuple[Call, Future[Beforehand]] | None = None  # of the first of those who wait
        self._ready: tuple[Call, Future[Beforehand]] | None = None  # of one whose turn it is
        self._passed_at = -math.inf  # the newest event that passed others

    def turn(self, calls: Sequence[Call], wait: bool = False) -> tuple[list[Call], list[Call]]:
        """Whose turn it is, and who waits; of calls in their order, those first that waited before.

        Nobody's, where all wait for a long part. `wait`: until it is there.
        """
        if self.executor is None or self._engine.spec.size < VALUES_MIN:
            return list(calls), []
        for call in calls:
            if call.event is not None and call.event.now < self._passed_at:
                call.event = replace(call.event, now=self._passed_at)
        calls = self._ticks_behind(calls)
        if self._work is None:
            self._work = self._begun(calls[0], self.executor)
        if self._work is not None and not (wait or self._work[1].done()):
            return self._passing(calls)
        self._ready, self._work = self._work, None
        end = self._sure(calls)
        return list(calls[:end]), list(calls[end:])

    def of(self, call: Call) -> Beforehand | None:
        """What was made of a call whose turn it is."""
        if self._ready is None or call is not self._ready[0]:
            return None
        (_, work), self._ready = self._ready, None
        return None if work.exception() else work.result()  # what failed fails again, and is told

    def forget(self) -> None:
        """Those whose turn it was are answered, or could not be logged."""
        self._ready = None

    def _sure(self, calls: Sequence[Call]) -> int:
        """How many of the calls come before the next update that may take long, the first one aside."""
        updates = [i for i, call in enumerate(calls) if isinstance(call.event, ev.UpdateArrived)]
        if not updates:
            return len(calls)
        event = calls[updates[0]].event
        assert event is not None, "it is an update"
        nth = self._engine.long_in(event.now)
        if self._ready is not None:  # behind it a new count begins, of which nothing is known yet
            nth = 2
        elif updates[0] == 0 and nth == 1:
            nth = 2  # it was looked at, and takes no time: it is refused, say
        return updates[nth - 1] if 0 < nth <= len(updates) else len(calls)

    def _begun(self, call: Call, executor: Executor) -> tuple[Call, Future[Beforehand]] | None:
        part = self._engine.long_part(call.event) if isinstance(call.event, ev.UpdateArrived) else None
        if part is None:
            return None
        try:
            work = executor.submit(_make, part)
        except RuntimeError as error:  # no thread can be started
            log.warning("a version is made in the writer's thread: %s", error)
            return None
        work.add_done_callback(lambda _: self.made())
        return call, work

    # --- who passes whom ---------------------------------------------------------------------

    def _passing(self, calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
        """Who need not wait: what changes nothing of the model, of devices of which nothing waits."""
        passing: list[Call] = []
        waiting: list[Call] = []
        devices: set[str | None] = set()
        for call in calls:
            device = _device(call.event)
            free = device is None or device not in devices
            if free and call.folding is None and self._is_light(call.event, calls):
                passing.append(call)
            else:
                waiting.append(call)
                devices.add(device)
        times = [call.event.now for call in passing if call.event is not None]
        self._passed_at = max([self._passed_at, *times])
        return passing, waiting

    def _is_light(self, event: ev.Event | None, calls: Sequence[Call]) -> bool:
        """Whether it leaves alone what the part at work is made of, and who waits."""
        in_rounds = self._engine.strategy.is_synchronous(self._engine.state)
        match event:
            case None | ev.LeaseRenewed() | ev.Enrolled():
                return True
            case ev.TaskAsked():
                return not in_rounds  # whose members a grant adds to
            case ev.Ticked(now):
                timer = self._engine.timer()
                idle = timer is None or timer > now
                return idle and not in_rounds and not any(self._ends_lease(now, call) for call in calls)
        return False

    def _ticks_behind(self, calls: Sequence[Call]) -> Sequence[Call]:
        """Who waits, with ticks behind the updates whose leases they would end: those came in time."""
        ticks = [
            call
            for call in calls
            if isinstance(call.event, ev.Ticked) and any(self._ends_lease(call.event.now, c) for c in calls)
        ]
        if not ticks:
            return calls
        return [call for call in calls if not any(call is tick for tick in ticks)] + ticks

    def _ends_lease(self, now: float, call: Call) -> bool:
        """Whether the lease of an update's task is over by then."""
        if not isinstance(call.event, ev.UpdateArrived):
            return False
        task = self._engine.ledger.tasks.get(call.event.update.task_id)
        return task is not None and task.expires_at <= now


def _make(part: LongPart) -> Beforehand:
    return Beforehand(part, part.make())


def _device(event: ev.Event | None) -> str | None:
    match event:
        case ev.UpdateArrived(update=update):
            return update.client_id
        case ev.TaskAsked(ask=ask):
            return ask.client_id
    return getattr(event, "client_id", None)
