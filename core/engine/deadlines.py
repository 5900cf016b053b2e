"""When the leases of open tasks end, the earliest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from anabranch.core.engine.ledger import Ledger
from anabranch.core.model.updates import Task, TaskState


class Deadlines:
    """A heap in which a lease that was extended has several entries: what the ledger says of it counts."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._heap: list[tuple[float, str]] = []

    def add(self, task: Task) -> None:
        """A lease ends at `expires_at`."""
        heapq.heappush(self._heap, (task.expires_at, task.task_id))

    def restore(self, tasks: Iterable[Task]) -> None:
        """Fill it anew."""
        self._heap = [(task.expires_at, task.task_id) for task in tasks]
        heapq.heapify(self._heap)

    def earliest(self) -> float | None:
        """When the next lease ends."""
        while self._heap and self._due(*self._heap[0]) is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def ended(self, now: float) -> Iterator[Task]:
        """The tasks whose leases have ended by now, one by one; each is gone from here."""
        while self._heap and self._heap[0][0] <= now:
            if (task := self._due(*heapq.heappop(self._heap))) is not None:
                yield task

    def _due(self, expires_at: float, task_id: str) -> Task | None:
        task = self._ledger.tasks.get(task_id)
        if task is None or task.state is not TaskState.LEASED or task.expires_at != expires_at:
            return None
        return task
