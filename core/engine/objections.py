"""Why an update is not for the strategy to see, whatever the method: what is true of every one of them."""

from __future__ import annotations

from typing import Protocol

from anabranch.core import events as ev
from anabranch.core.effects import Conflicting, Decided
from anabranch.core.engine.cohorts import Cohorts, is_masked
from anabranch.core.engine.guard import Guard
from anabranch.core.engine.ledger import Ledger
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.strategy import Context, State, Strategy, rejected
from anabranch.core.model.updates import Decision, Reason, Receipt, Task, Update


class ObjectionView(Protocol):
    """What the engine has on record."""

    strategy: Strategy
    state: State
    settings: EngineSettings
    ledger: Ledger
    guard: Guard
    version: int
    finished: str
    cohorts: Cohorts | None

    @property
    def ending(self) -> str:
        """Why nothing more is taken although the run goes on."""
        ...

    def staleness(self, of: Task) -> int:
        """How late an update of a task is by now."""
        ...


def objection(
    event: ev.UpdateArrived, task: Task | None, context: Context, books: ObjectionView
) -> Decision | None:
    """The rejection of an update of `task`, or None where there is nothing against it."""
    update, staleness, bound = event.update, context.staleness, books.settings.staleness_max

    def no(reason: Reason, detail: str) -> Decision:
        return rejected(max(staleness, 0), reason, detail)

    if task is None or task.client_id != update.client_id:
        return no(*_no_task(update, task, books))
    if ended := books.finished or books.ending:
        return no(Reason.RUN_FINISHED, ended)
    if flaw := _flaw(event, books):
        return no(Reason.INVALID, flaw)
    if staleness < 0:
        detail = f"base_version {update.base_version} is ahead of version {books.version}"
        return no(Reason.FUTURE_BASE, detail)
    if wrong := _wrong_base(event, task):
        return no(*wrong)
    if update.submodel is not None and not books.strategy.supports_submodels:
        return no(Reason.NO_SUBMODELS, f"strategy {books.strategy.name!r} takes whole models only")
    if update.submodel != task.submodel and not books.settings.any_submodel:
        return no(Reason.WRONG_SUBMODEL, "the update covers another part of the model than its task")
    if bound and staleness > bound:
        return no(Reason.STALE, f"staleness {staleness} is over the bound of {bound} versions")
    return None


def _flaw(event: ev.UpdateArrived, books: ObjectionView) -> str:
    """What is wrong with an update's values, or nothing."""
    if books.cohorts is not None:
        return event.flaw or books.cohorts.flaw(event.update)
    # In a private run it adds nothing, but it counts: or the number of versions would tell of its values.
    if event.flaw:
        return "" if books.settings.participations_max else event.flaw
    return "the update is masked, and this run's are not" if is_masked(event.update) else ""


def tasks_of_use(books: ObjectionView) -> set[tuple[str, str]]:
    """Client and id of each task whose update may still be taken, as far as is known before it comes."""
    bound = books.settings.staleness_max
    return {
        (task.client_id, task.task_id)
        for task in books.ledger.tasks.values()
        if not books.finished and not (bound and books.staleness(task) > bound)
    }


def repeated(event: ev.UpdateArrived, known: Receipt) -> Decided | Conflicting:
    """What comes of an update whose id was decided before: the same answer, if it is the same update."""
    update = event.update
    if why := known.conflict(update.client_id, update.task_id, event.payload.sha256):
        return Conflicting(update.client_id, update.update_id, why)
    return Decided(update.client_id, known, update.examples, duplicate=True)


def _wrong_base(event: ev.UpdateArrived, task: Task) -> tuple[Reason, str] | None:
    """Why the update was not trained from what its task starts from, or None."""
    base = event.update.base_version
    if base != task.base_version:
        return Reason.WRONG_BASE, f"the task's base_version is {task.base_version}, not {base}"
    if event.other_base:
        return Reason.OTHER_BASE, f"it was trained from a version {base} of another history, which is lost"
    return None


def _no_task(update: Update, task: Task | None, books: ObjectionView) -> tuple[Reason, str]:
    """Why the client has no task for this update."""
    if update.client_id in books.guard.quarantined:
        return Reason.QUARANTINED, books.guard.quarantined[update.client_id]
    if (used := books.ledger.receipt_of_task(update.task_id)) is not None:
        return Reason.DUPLICATE_TASK, f"task {update.task_id!r} was answered by update {used.update_id!r}"
    in_rounds = books.strategy.is_synchronous(books.state)
    if task is None and in_rounds and update.base_version < books.version:
        return Reason.ROUND_OVER, f"round {update.base_version} is over, this is round {books.version}"
    return Reason.UNKNOWN_TASK, f"client {update.client_id!r} holds no task {update.task_id!r}"
