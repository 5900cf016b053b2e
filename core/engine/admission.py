"""Why an ask gets no task, whatever the method; what the strategy has against it comes last."""

from __future__ import annotations

from typing import Protocol

from anabranch.core.effects import Refused
from anabranch.core.engine.answers import checked_refusal, checked_state
from anabranch.core.engine.cohorts import Cohorts
from anabranch.core.engine.guard import Guard
from anabranch.core.engine.ledger import Ledger
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.strategy import AsyncStrategy, Context, Refusal, State, Strategy
from anabranch.core.events import TaskDropped
from anabranch.core.model.chains import lacks
from anabranch.core.model.updates import Ask, Reason, Task, TaskState


class AdmissionView(Protocol):
    """What the engine has on record."""

    strategy: Strategy
    state: State
    settings: EngineSettings
    ledger: Ledger
    guard: Guard
    paused: bool
    finished: str
    cohorts: Cohorts | None

    def context(self, now: float, *, live_tasks: int | None = None) -> Context:
        """What the engine knows at a moment; `live_tasks`: as many as there would be, if not as they are."""
        ...

    @property
    def ending(self) -> str:
        """Why nothing more is taken although the run goes on."""
        ...


class Application:
    """An ask as the books have it at a moment: why it would get no task, behind however many.

    Most asks of a large fleet are refused, and looked at twice: as if nobody waited, then in the line. So
    what is the same for both is looked up once, and what only a strategy wants to know for a strategy.
    """

    __slots__ = ("_ask", "_books", "_depends", "_gone", "_now", "_own")

    def __init__(self, ask: Ask, now: float, books: AdmissionView) -> None:
        self._ask, self._now, self._books = ask, now, books
        self._gone: list[Task] = []  # live tasks that the client gives up by asking
        self._depends = False  # on who else is there
        self._own = self._looked_up()

    def refusal(self, ahead: int = 0) -> Refusal | None:
        """Why it would get no task now, or None. Changes nothing. `ahead`: as for `Engine.refusal`."""
        if self._own is not None or not self._depends:
            return self._own
        books, gone = self._books, self._gone
        live, most = books.ledger.live - len(gone) + ahead, books.settings.concurrency
        # A device that asks anew with a task in hand keeps its place where nobody waits for it.
        if most and live >= most and (ahead or not gone):
            return Refusal(Reason.AT_CAPACITY, f"{live} of {most} devices are in training")
        state, strategy = books.state, books.strategy
        if getattr(strategy.admit, "__func__", None) is AsyncStrategy.admit:
            return None  # it lets everybody in, as most do, and needs to know nothing for that
        if gone:
            before = books.context(self._now)
            for task in gone:
                found = strategy.on_lost(state, task, before)
                state = checked_state(found, f"strategy {strategy.name!r}: on_lost", strategy.state_type)
        found = strategy.admit(state, self._ask, books.context(self._now, live_tasks=live))
        return None if found is None else checked_refusal(found, f"strategy {strategy.name!r}")

    def _looked_up(self) -> Refusal | None:
        """What is against it whoever else is there."""
        ask, books = self._ask, self._books
        ledger = books.ledger
        if books.finished:
            return Refusal(Reason.RUN_FINISHED, books.finished)
        known = ledger.tasks.get(ask.task_id)
        if known is not None and known.client_id == ask.client_id and known.state is TaskState.LEASED:
            return None
        if books.paused:
            return Refusal(Reason.PAUSED, "the run is paused by its operator")
        if ask.client_id not in ledger.clients:
            return Refusal(Reason.UNKNOWN_CLIENT, f"client {ask.client_id!r} is not enrolled: enrol first")
        if known is not None or ledger.receipt_of_task(ask.task_id) is not None:
            return used_up(ask)
        if books.settings.admits_all:
            return None
        self._depends = True
        return self._barred()

    def _barred(self) -> Refusal | None:
        """What is against the client itself."""
        client_id, books, settings = self._ask.client_id, self._books, self._books.settings
        others = 0
        if live := books.ledger.live_of(client_id):
            self._gone = [task for task in superseded(self._ask, books) if task.state is TaskState.LEASED]
            others = len(live) - len(self._gone)
        found = None if books.cohorts is None else _unmasked(client_id, books.cohorts, books)
        if found is None and settings.participations_max:
            found = _spent(client_id, others, books)
        return found or books.guard.refusal(client_id, others, self._now, settings)


def used_up(ask: Ask) -> Refusal:
    """That an ask comes under the id of a task that is over."""
    return Refusal(Reason.DUPLICATE_TASK, f"task {ask.task_id!r} was used before: ask under a new id")


def _spent(client_id: str, live: int, books: AdmissionView) -> Refusal | None:
    """That a client has given, or is about to, all the updates that it may give in the run."""
    most = books.settings.participations_max
    if books.ledger.clients[client_id].accepted + live < most:
        return None
    return Refusal(Reason.OVER_SHARE, f"has given the {most} updates that [privacy] lets one device give")


def _unmasked(client_id: str, cohorts: Cohorts, books: AdmissionView) -> Refusal | None:
    """That a client cannot mask, or that so many sums wait for their keepers that more would be of no use."""
    settings = books.settings
    if missing := lacks(books.ledger.clients[client_id].capability.codecs, settings.uplink):
        detail = f"updates are masked here, and the device does not say that it has {missing[0]!r}"
        return Refusal(Reason.NO_MASKS, detail)
    if ending := books.ending:
        return Refusal(Reason.AT_CAPACITY, f"{ending}, once its keepers have answered")
    if len(cohorts.waiting) >= settings.cohorts_waiting_max:
        keepers = {k for c in cohorts.waiting for k in cohorts.terms.keepers if k not in c.answered}
        detail = f"{len(cohorts.waiting)} sums wait for {len(keepers)} of their keepers"
        return Refusal(Reason.AT_CAPACITY, detail)
    return None


def superseded(ask: Ask, books: AdmissionView) -> list[Task]:
    """The tasks that the client gives up by asking, beyond what it may hold: expired, then old ones.

    What is left may still be answered: the result of an expired task may be on its way. Where a client's
    share is bounded none is left, or whoever lets its leases expire could answer more than its share at once.
    """
    settings, ledger = books.settings, books.ledger
    if not ledger.has_open(ask.client_id):  # as nearly all who ask
        return []
    bounded = bool(settings.buffer_max or settings.window_max)
    expired = ledger.expired_of(ask.client_id)
    mine = expired + ledger.live_of(ask.client_id)
    at_least = len(expired) if bounded else 0
    return mine[: max(at_least, len(mine) - settings.tasks_per_client + 1)]


def dropped_by(refused: Refused, now: float, books: AdmissionView) -> TaskDropped | None:
    """What frees the place of a device that asked anew with a task in hand, and is told to wait its turn."""
    if refused.reason not in (Reason.AT_CAPACITY, Reason.LAPSED, Reason.TOO_FAST):
        return None
    for task in superseded(refused.ask, books):
        if task.state is TaskState.LEASED:
            return TaskDropped(now, task.client_id, task.task_id, "its device asked anew")
    return None


def outstays(task: Task, now: float, settings: EngineSettings) -> bool:
    """Whether a task has had its place for longer than one may while others wait."""
    return 0 < settings.tenure_leases * task.lease_s <= now - task.granted_at
