"""Whose turn it is where places are few: the line of devices that were refused for want of a place.

Without it a device that has just pushed, and asks within milliseconds, wins every time against one that
was refused and comes back in a second. So a place that is free belongs to the device that has waited
longest. That one is not there at the moment, and the place stays empty until it is: so each is told to come
back as soon as its turn may be near, the first in the line most often of all (`pace.py`).

A device that asks anew with a task in hand gives the task up, and has its turn like the others: it keeps the
place only where there are enough for all who wait. One whose last tasks came to nothing waits longer
(`lapses.py`), and while somebody waits no place is kept by renewals for ever (`server.tenure_leases`). Of two
processes of one device one has its tasks, and the other waits (`sessions.py`).

In a live server it also knows the tasks that have lately come to nothing, which the engine has forgotten: a
copy of an ask for one of them that comes late would end the task that its device has by then.

Beside the engine, and no part of its state or its journal: a refusal changes nothing there, and after
a restart the line forms again. Pure like the engine, driven by the same `now`, and bounded.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable

from anabranch.core.config.ranges import PLACES, TURNS
from anabranch.core.effects import Effect, Granted, LeaseEnded, Refused
from anabranch.core.engine.admission import Application, outstays, used_up
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.lapses import Lapses
from anabranch.core.engine.pace import Pace
from anabranch.core.engine.sessions import Sessions
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.strategy import Refusal
from anabranch.core.events import LeaseRenewed
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.updates import Ask, Reason, Task
from anabranch.core.unwritten import dataclass

GRACE_S = 0.5  # for the way there and back; a device that is later is not waited for
KEPT_S = 60.0  # and one that is so much later has lost its turn


@dataclass(frozen=True, slots=True)
class Waiter:
    """A device in the line: a lower `ticket` comes first. After `until` it is not waited for."""

    ticket: int
    until: float


class WaitingLine:
    """The line of devices that were refused for want of a place: whose turn it is.

    `refusal` stands in for the engine's; `heard` must see every effect of the engine. `lapsed`: the rule for
    devices whose tasks came to nothing, see `Lapses`; `windows`: the one for when who waits comes back, see
    `Pace`. `ended_max`: of so many tasks that came to nothing the ids are used up; simulations have none, so
    that what older releases have recorded is simulated again to the bit.
    """

    def __init__(
        self,
        limits: Limits = DEFAULT_LIMITS,
        lapsed: str = TURNS,
        windows: str = PLACES,
        ended_max: int = 0,
    ) -> None:
        self.waiting_max, self._ended_max = limits.waiting_max, ended_max
        self._ended: dict[str, str] = {}  # tasks that came to nothing, the newest last, and their clients
        self._pace = Pace(windows)
        self._waiters: dict[str, Waiter] = {}
        self._tickets: list[int] = []
        self._ends: list[tuple[float, int, str]] = []
        self._drawn = 0
        self._lapses = Lapses(limits.waiting_max, lapsed)
        self.sessions = Sessions()
        self._sound: set[int] = set()  # the tickets of devices that may have any place
        self._sharing: list[int] = []  # of those that share a few places, in turns
        self._passed: list[int] = []  # of these, who waits for one of the few, as only its like do

    def __len__(self) -> int:
        return len(self._waiters)

    def begin(self) -> None:
        """A batch of messages begins: all that came before is decided, or could not be written."""
        self.sessions.begin()

    def refusal(self, engine: Engine, ask: Ask, now: float) -> Refused | None:
        """Why this ask would get no task now, or None. Changes nothing of the engine."""
        self._forget(now)
        application = Application(ask, now, engine)
        found, final = application.refusal(), bool(engine.finished)
        another = self.sessions.refusal(engine, ask, now)
        self.sessions.heard(ask.client_id, ask.session, now)
        if found is None and ask.task_id in engine.ledger.tasks:
            return None  # it has this very task
        if another is not None and not (found is not None and final):
            return another
        refused = None
        if (found is None or found.reason is Reason.AT_CAPACITY) and self._has_ended(ask):
            found = used_up(ask)
        if found is None or found.reason is Reason.AT_CAPACITY:
            refused = self._lapsed(engine, ask, now)
        if refused is None:
            ahead, detail = self.ahead(ask.client_id), ""
            if found is None and ahead:  # the place is another's first
                found = application.refusal(ahead)
                detail = f"devices that have waited longer for a place: {ahead}"
            if found is None:
                self.sessions.passed(ask)
                return None
            window_s = self._window_s(engine.settings, found, ahead, now)
            refused = Refused(ask, found.reason, detail or found.detail, window_s, final)
        self._join(refused, now)
        return refused

    def beats(self, beat: LeaseRenewed) -> None:
        """A heartbeat has come, of use or not."""
        self.sessions.heard(beat.client_id, beat.session, beat.now)

    def renews(self, engine: Engine, task: Task, now: float) -> bool:
        """Whether a heartbeat may renew the lease of this task: not for ever, while others wait."""
        return not (self._tickets and outstays(task, now, engine.settings))

    def heard(self, now: float, effects: Iterable[Effect]) -> None:
        """Take note of what an event has come to: places taken, places freed."""
        effects = list(effects)
        self._lapses.heard(now, effects)
        self._pace.heard(now, effects)
        for effect in effects:
            match effect:
                case Granted(task):
                    self._leave(task.client_id)
                    self.sessions.decided(task.client_id, task.task_id, granted=True)
                case Refused(ask):
                    self._join(effect, now)
                    self.sessions.decided(ask.client_id, ask.task_id, granted=False)
                case LeaseEnded(task):
                    self._ended[task.task_id] = task.client_id
                    if len(self._ended) > self._ended_max:
                        del self._ended[next(iter(self._ended))]

    def ahead(self, client_id: str) -> int:
        """How many devices wait whose turn comes before this one's."""
        ahead = self._before(self._tickets, client_id)
        if self._passed and client_id in self._lapses:
            ahead += self._before(self._passed, client_id)
        return ahead

    def _has_ended(self, ask: Ask) -> bool:
        return self._ended.get(ask.task_id) == ask.client_id

    # --- the line ----------------------------------------------------------------------------

    def _lapsed(self, engine: Engine, ask: Ask, now: float) -> Refused | None:
        """The refusal of a device whose last tasks came to nothing, while others wait."""
        if not self._sound or ask.client_id not in self._lapses:
            return None
        return self._lapses.refusal(engine, ask, now, self._before(self._sharing, ask.client_id))

    def _window_s(
        self, settings: EngineSettings, found: Refusal, ahead: int, now: float
    ) -> tuple[float, float]:
        """When a device that has so many ahead is to come back."""
        if found.reason is not Reason.AT_CAPACITY or not self.waiting_max:
            return settings.retry_after_s
        places = found.places or settings.concurrency
        return self._pace.window_s(now, ahead, len(self._waiters), places, settings.retry_after_s)

    def _join(self, refused: Refused, now: float) -> None:
        """Keep the device's turn until it should be back; who is refused for another reason has none.

        One of those who have enough places has its turn, but no place is kept for it meanwhile.
        """
        client_id = refused.ask.client_id
        passed_over = refused.reason is Reason.LAPSED and not self._lapses.waits(client_id, now)
        if refused.reason is not Reason.AT_CAPACITY and not passed_over:
            self._leave(client_id)
            return
        known = self._waiters.get(client_id)
        if known is None and len(self._waiters) >= self.waiting_max:
            return
        self._drawn += known is None
        ticket = self._drawn if known is None else known.ticket
        if passed_over:
            self._pass_over(ticket)
        else:
            _put(self._tickets, ticket)
            _take(self._passed, ticket)
        if client_id not in self._lapses:
            self._sound.add(ticket)
        elif self._lapses.in_turns:
            _put(self._sharing, ticket)
            if passed_over:
                _put(self._passed, ticket)
        waiter = self._waiters[client_id] = Waiter(ticket, now + refused.retry_after_s[1] + GRACE_S)
        heapq.heappush(self._ends, (waiter.until, waiter.ticket, client_id))
        if len(self._ends) > 2 * self.waiting_max:  # somebody asks without end: keep what still counts
            self._ends = [(w.until, w.ticket, c) for c, w in self._waiters.items()]
            heapq.heapify(self._ends)

    def _leave(self, client_id: str) -> None:
        waiter = self._waiters.pop(client_id, None)
        if waiter is not None:
            self._pass_over(waiter.ticket)

    def _forget(self, now: float) -> None:
        """Pass over those who should be back and are not; in the end let them go."""
        while self._ends and self._ends[0][0] < now:
            at, ticket, client_id = heapq.heappop(self._ends)
            waiter = self._waiters.get(client_id)
            if waiter is None or waiter.ticket != ticket:
                continue
            if at == waiter.until:
                self._pass_over(ticket)
                heapq.heappush(self._ends, (at + KEPT_S, ticket, client_id))
            elif at == waiter.until + KEPT_S:
                self._leave(client_id)

    def _pass_over(self, ticket: int) -> None:
        self._sound.discard(ticket)
        for tickets in (self._tickets, self._sharing, self._passed):
            _take(tickets, ticket)

    def _before(self, tickets: list[int], client_id: str) -> int:
        """How many of these come before a device's; all, if it has none."""
        waiter = self._waiters.get(client_id)
        return len(tickets) if waiter is None else bisect_left(tickets, waiter.ticket)


def _put(tickets: list[int], ticket: int) -> None:
    at = bisect_left(tickets, ticket)
    if at == len(tickets) or tickets[at] != ticket:
        tickets.insert(at, ticket)


def _take(tickets: list[int], ticket: int) -> None:
    at = bisect_left(tickets, ticket)
    if at < len(tickets) and tickets[at] == ticket:
        del tickets[at]
