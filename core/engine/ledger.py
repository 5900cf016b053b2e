"""The books of the server machine: who is enrolled, which tasks are open, what was answered.

`bases` counts the live tasks that started from each version: the engine keeps the model of a
version while somebody may still return to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace
from itertools import islice
from typing import Any

from anabranch.core.engine.step_times import Seen, StepTime, fixed_of, observed, quantile, whole_of
from anabranch.core.model.submodels import UnitMap
from anabranch.core.model.updates import Capability, Receipt, Task, TaskState, Update
from anabranch.core.unwritten import dataclass

EWMA_WEIGHT = 0.3  # of the newest time
TRAIN_S = "train_s"  # the metric in which a device says how many seconds it trained
STEP_S_MIN, STEP_S_MAX = 1e-12, 1e12  # of a step, in seconds: by what is beyond nothing can be divided
CAPABILITIES_KEPT = 4096  # what that many kinds of devices say of themselves is kept once


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """What the server knows of a device, whose name the ledger has.

    Mean times in seconds: `task_s_ewma` from grant to update, `step_s_ewma` of a local step, as if it were of
    the whole model. Where parts differ in size `steps` are the newest ones, and that is what they tell.
    """

    capability: Capability
    accepted: int = 0
    rejected: int = 0
    task_s_ewma: float | None = None
    step_s_ewma: float | None = None
    steps: Seen = ()

    @property
    def step_s(self) -> float | None:
        """The mean time of a local step to two digits, so that devices of one kind are equals."""
        return None if self.step_s_ewma is None else float(f"{self.step_s_ewma:.1e}")


@dataclass
class Counters:
    """Totals since version 0. `left_out`: of the updates applied, by rollbacks."""

    granted: int = 0
    applied: int = 0
    rejected: int = 0
    duplicates: int = 0
    leases_lost: int = 0
    rollbacks: int = 0
    left_out: int = 0


@dataclass
class Unsaved:
    """What of the books is in no snapshot: new clients in their order, changed ones, how many receipts."""

    enrolled: list[str] = field(default_factory=list)
    clients: set[str] = field(default_factory=set)
    receipts: int = 0


@dataclass
class Touched:
    """What has changed: whose capability, which tasks, and the receipts of which updates, by id."""

    clients: set[str] = field(default_factory=set)
    tasks: set[str] = field(default_factory=set)
    updates: set[str] = field(default_factory=set)


class Ledger:
    """Clients, tasks and receipts, with the indices that make every look-up cheap.

    `times_steps`: tasks are of parts of several sizes, and what a device's steps take by that is learned.
    """

    def __init__(self, receipts_max: int, times_steps: bool = False) -> None:
        self.receipts_max, self.times_steps = receipts_max, times_steps
        self.clients: dict[str, ClientRecord] = {}
        self.tasks: dict[str, Task] = {}
        self.receipts: dict[str, Receipt] = {}
        self.live = 0
        self.bases: Counter[int] = Counter()
        self._by_client: dict[str, list[str]] = {}
        self._answered: dict[str, str] = {}
        self._steps_s: Counter[float] = Counter()  # how many clients have a step time: it has two digits
        self._fixed: Counter[float] = Counter()  # and a part of it that is theirs whatever they train
        self._kinds: dict[Capability, ClientRecord] = {}
        # Noted for a driver that saves the books piece by piece (`track`), by nobody else.
        self.unsaved: Unsaved | None = None
        # The same for a driver that shows the books to other threads.
        self.touched: Touched | None = None

    # --- clients -----------------------------------------------------------------------------

    @property
    def client_ids(self) -> Collection[str]:
        """Every enrolled client, in the order of enrolment: a view, not a copy."""
        return self.clients.keys()

    def enrol(self, client_id: str, capability: Capability) -> None:
        """Add a client, or take note of what it says of itself now."""
        known, fresh = self.clients.get(client_id), self._fresh(capability)
        self.clients[client_id] = fresh if known is None else replace(known, capability=fresh.capability)
        self._note(client_id, is_new=known is None)
        if self.touched is not None:
            self.touched.clients.add(client_id)

    def _fresh(self, capability: Capability) -> ClientRecord:
        """Of a device that has done nothing yet; others have the same one: a fleet has few kinds of them."""
        found = self._kinds.get(capability)
        if found is None:
            if len(self._kinds) >= CAPABILITIES_KEPT:
                self._kinds.clear()
            found = self._kinds[capability] = ClientRecord(capability)
        return found

    def _note(self, client_id: str, is_new: bool = False) -> None:
        if self.unsaved is not None:
            self.unsaved.clients.add(client_id)
            if is_new:
                self.unsaved.enrolled.append(client_id)

    def finished_task(self, task: Task, now: float, update: Update, rejection: bool) -> None:
        """Count an answered task for its client and learn the client's speed from it."""
        client = self.clients[task.client_id]
        took_s = now - task.granted_at
        known = replace(
            client,
            accepted=client.accepted + (not rejection),
            rejected=client.rejected + rejection,
            task_s_ewma=_ewma(client.task_s_ewma, took_s),
            **self._timed(client, _step_s(update, took_s), _share(update)),
        )
        self._rank(client, -1)
        self._rank(known, +1)
        self.clients[task.client_id] = known
        self._note(task.client_id)

    def slowness(self, client_id: str) -> float | None:
        """A client's place among those whose step time is known: 0 the fastest, 1 the slowest."""
        step_s = self.clients[client_id].step_s
        if step_s is None:
            return None
        faster = sum(count for other_s, count in self._steps_s.items() if other_s < step_s)
        slower = sum(count for other_s, count in self._steps_s.items() if other_s > step_s)
        return faster / (faster + slower) if faster + slower else 0.5

    def step_time(self, client_id: str) -> StepTime | None:
        """How long a client's steps take by the part that it trains; None until it has trained."""
        client = self.clients[client_id]
        fast_s = quantile(self._steps_s, 0.25) if client.steps else None
        if client.step_s is None or fast_s is None:
            return None
        whole, fixed = client.step_s / fast_s, self._fixed_of(client)
        return StepTime(fixed * whole, (1 - fixed) * whole)

    def _timed(self, client: ClientRecord, step_s: float | None, share: float) -> dict[str, Any]:
        """What one more step changes, of so many seconds, of so much of the model."""
        if step_s is None:
            return {}
        if not self.times_steps:
            return {"step_s_ewma": _ewma(client.step_s_ewma, step_s / share)}
        client = replace(client, steps=observed(client.steps, share, step_s))
        return {"steps": client.steps, "step_s_ewma": whole_of(client.steps, self._fixed_of(client))}

    def _fixed_of(self, client: ClientRecord) -> float:
        """Its own, else the fleet's, else 0."""
        own = fixed_of(client.steps)
        return own if own is not None else quantile(self._fixed, 0.5) or 0.0

    def _rank(self, client: ClientRecord, by: int) -> None:
        """Keep count of the step times."""
        for counts, value in ((self._steps_s, client.step_s), (self._fixed, fixed_of(client.steps))):
            if value is not None:
                counts[value] += by
                if not counts[value]:
                    del counts[value]

    # --- tasks -------------------------------------------------------------------------------

    def open(self, task: Task) -> None:
        """Enter a task."""
        self.tasks[task.task_id] = task
        self._by_client.setdefault(task.client_id, []).append(task.task_id)
        self._count(task, +1)

    def replace(self, task: Task) -> None:
        """Change a task's state or expiry."""
        self._count(self.tasks[task.task_id], -1)
        self.tasks[task.task_id] = task
        self._count(task, +1)

    def close(self, task: Task) -> None:
        """Remove a task."""
        current = self.tasks.pop(task.task_id)
        self._count(current, -1)
        mine = self._by_client[task.client_id]
        mine.remove(task.task_id)
        if not mine:
            del self._by_client[task.client_id]

    def leased(self) -> list[Task]:
        """All live tasks."""
        return [t for t in self.tasks.values() if t.state is TaskState.LEASED]

    @property
    def holders(self) -> set[str]:
        """The clients that have a live task."""
        return {t.client_id for t in self.leased()}

    def has_open(self, client_id: str) -> bool:
        """Whether the client has any task, live or expired."""
        return client_id in self._by_client

    def live_of(self, client_id: str) -> list[Task]:
        """The client's live tasks, oldest first."""
        return self._of(client_id, TaskState.LEASED) if client_id in self._by_client else []

    def expired_of(self, client_id: str) -> list[Task]:
        """The client's expired tasks, oldest first."""
        return self._of(client_id, TaskState.EXPIRED) if client_id in self._by_client else []

    def _of(self, client_id: str, state: TaskState) -> list[Task]:
        return [task for i in self._by_client[client_id] if (task := self.tasks[i]).state is state]

    def _count(self, task: Task, by: int) -> None:
        if self.touched is not None:
            self.touched.tasks.add(task.task_id)
        if task.state is not TaskState.LEASED:
            return
        self.live += by
        self.bases[task.base_version] += by
        if not self.bases[task.base_version]:
            del self.bases[task.base_version]

    # --- receipts ----------------------------------------------------------------------------

    def file(self, receipt: Receipt, answers_task: bool) -> None:
        """Keep a receipt; the oldest leave once there are more than `receipts_max`."""
        self.receipts[receipt.update_id] = receipt
        if answers_task:
            self._answered[receipt.task_id] = receipt.update_id
        if self.unsaved is not None:
            self.unsaved.receipts += 1
        self._touch(receipt)
        while len(self.receipts) > self.receipts_max:
            oldest = self.receipts.pop(next(iter(self.receipts)))
            self._touch(oldest)
            if self._answered.get(oldest.task_id) == oldest.update_id:
                del self._answered[oldest.task_id]

    def _touch(self, receipt: Receipt) -> None:
        if self.touched is not None:
            self.touched.updates.add(receipt.update_id)

    def receipt_of_task(self, task_id: str) -> Receipt | None:
        """The receipt of the update that answered a task."""
        update_id = self._answered.get(task_id)
        return None if update_id is None else self.receipts[update_id]

    def restore(
        self,
        clients: Mapping[str, ClientRecord],
        tasks: Iterable[Task],
        receipts: Iterable[tuple[Receipt, bool]],
    ) -> None:
        """Fill empty books, in the given order."""
        for client_id, client in clients.items():
            fresh = self._fresh(client.capability)
            kept = fresh if client == fresh else replace(client, capability=fresh.capability)
            self.clients[client_id] = kept
            self._rank(kept, +1)
        for task in tasks:
            self.open(task)
        for receipt, answers_task in receipts:
            self.file(receipt, answers_task)

    def track(self, saved: bool) -> None:
        """Note from now on what is in no snapshot; `saved`: all that is here is in one, as rows."""
        self.unsaved = Unsaved()
        if not saved:
            self.unsaved = Unsaved(list(self.clients), set(self.clients), len(self.receipts))

    def unsaved_after_all(self, before: Unsaved) -> None:
        """What was taken for a snapshot that has come to nothing goes into the next one."""
        assert self.unsaved is not None, "a ledger that is saved in pieces notes what changed"
        since = self.unsaved
        enrolled, clients = before.enrolled + since.enrolled, before.clients | since.clients
        self.unsaved = Unsaved(enrolled, clients, before.receipts + since.receipts)

    def newest_receipts(self, count: int) -> list[Receipt]:
        """So many receipts, or all where there are fewer, oldest first."""
        return list(islice(reversed(self.receipts.values()), count))[::-1]

    def answers_task(self, receipt: Receipt) -> bool:
        """Whether this receipt is the one that used up its task."""
        return self._answered.get(receipt.task_id) == receipt.update_id


def _ewma(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - EWMA_WEIGHT) * mean + EWMA_WEIGHT * newest


def _step_s(update: Update, took_s: float) -> float | None:
    """Seconds of one of the update's steps.

    A device says how long it trained (`TRAIN_S`); without that the whole task's time stands in for it. None
    where that is no time of a step: a device may say any number.
    """
    step_s = update.metrics.get(TRAIN_S, took_s) / max(update.local_steps, 1)
    return step_s if update.local_steps and STEP_S_MIN <= step_s <= STEP_S_MAX else None


def _share(update: Update) -> float:
    """How much of the model the update's task was of; some whole tensors are trained within all of it."""
    return update.submodel.size / update.submodel.spec.size if isinstance(update.submodel, UnitMap) else 1.0
