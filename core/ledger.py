"""The books of the server machine: who is enrolled, which tasks are open, what was answered.

`bases` counts the live tasks that started from each version: the engine keeps the model of a
version while somebody may still return to it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from anabranch.core.updates import Capability, Receipt, Task, TaskState

EWMA_WEIGHT = 0.3  # of the newest task time


@dataclass(frozen=True)
class ClientRecord:
    """What the server knows of a device. `task_s_ewma`: mean time from grant to update, seconds."""

    client_id: str
    capability: Capability
    accepted: int = 0
    rejected: int = 0
    task_s_ewma: float | None = None


class Ledger:
    """Clients, tasks and receipts, with the indices that make every look-up cheap."""

    def __init__(self, receipts_max: int) -> None:
        self.receipts_max = receipts_max
        self.clients: dict[str, ClientRecord] = {}
        self.tasks: dict[str, Task] = {}
        self.receipts: dict[str, Receipt] = {}
        self.live = 0
        self.bases: Counter[int] = Counter()
        self._by_client: dict[str, list[str]] = {}
        self._answered: dict[str, str] = {}
        self._client_ids: tuple[str, ...] | None = ()

    # --- clients -----------------------------------------------------------------------------

    @property
    def client_ids(self) -> tuple[str, ...]:
        """Every enrolled client, in the order of enrolment."""
        if self._client_ids is None:
            self._client_ids = tuple(self.clients)
        return self._client_ids

    def enrol(self, client_id: str, capability: Capability) -> None:
        """Add a client, or take note of what it says of itself now."""
        known = self.clients.get(client_id)
        if known is None:
            self._client_ids = None
            self.clients[client_id] = ClientRecord(client_id, capability)
        else:
            self.clients[client_id] = replace(known, capability=capability)

    def finished_task(self, task: Task, now: float, rejection: bool) -> None:
        """Count an answered task for its client and learn the client's speed from it."""
        client = self.clients[task.client_id]
        took_s = now - task.granted_at
        ewma = client.task_s_ewma
        self.clients[task.client_id] = replace(
            client,
            accepted=client.accepted + (not rejection),
            rejected=client.rejected + rejection,
            task_s_ewma=took_s if ewma is None else (1 - EWMA_WEIGHT) * ewma + EWMA_WEIGHT * took_s,
        )

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

    def live_of(self, client_id: str) -> list[Task]:
        """The client's live tasks, oldest first."""
        return [t for t in self._of(client_id) if t.state is TaskState.LEASED]

    def expired_of(self, client_id: str) -> list[Task]:
        """The client's expired tasks, oldest first."""
        return [t for t in self._of(client_id) if t.state is TaskState.EXPIRED]

    def _of(self, client_id: str) -> list[Task]:
        return [self.tasks[i] for i in self._by_client.get(client_id, [])]

    def _count(self, task: Task, by: int) -> None:
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
        while len(self.receipts) > self.receipts_max:
            oldest = self.receipts.pop(next(iter(self.receipts)))
            if self._answered.get(oldest.task_id) == oldest.update_id:
                del self._answered[oldest.task_id]

    def receipt_of_task(self, task_id: str) -> Receipt | None:
        """The receipt of the update that answered a task."""
        update_id = self._answered.get(task_id)
        return None if update_id is None else self.receipts[update_id]

    def restore(
        self, clients: list[ClientRecord], tasks: list[Task], receipts: list[tuple[Receipt, bool]]
    ) -> None:
        """Fill empty books, in the given order."""
        for client in clients:
            self.clients[client.client_id] = client
        self._client_ids = None
        for task in tasks:
            self.open(task)
        for receipt, answers_task in receipts:
            self.file(receipt, answers_task)

    def answers_task(self, receipt: Receipt) -> bool:
        """Whether this receipt is the one that used up its task."""
        return self._answered.get(receipt.task_id) == receipt.update_id
