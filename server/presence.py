"""Who has called since the server started, and which version each was given last: for operators to look at.

It is of this process alone: nothing is decided by it, and the log has nothing of it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from anabranch.core.model.updates import Task


class Presence:
    """For the event loop's thread. `silence_s`: who has said nothing for longer is not online.

    Who trains calls three times in its lease, which may be longer. `tasks`: from before the server started.
    """

    def __init__(self, silence_s: float, tasks: Iterable[Task] = ()) -> None:
        self.silence_s = silence_s
        self._seen_at: dict[str, float] = {}
        self._given: dict[str, int] = {}
        self._leases_s: dict[str, dict[str, float]] = {}  # of who trains, by the tasks
        for task in tasks:
            self._trains(task)

    def seen(self, client_id: str, now: float) -> None:
        """A client has called."""
        self._seen_at[client_id] = now

    def given(self, task: Task) -> None:
        """A client has got a task."""
        self._given[task.client_id] = task.base_version
        self._trains(task)

    def done(self, client_id: str, task_id: str) -> None:
        """A task has ended."""
        leases_s = self._leases_s.get(client_id, {})
        leases_s.pop(task_id, None)
        if not leases_s:
            self._leases_s.pop(client_id, None)

    def seen_at(self, client_id: str) -> float:
        """When it called last, in seconds since 1970; 0 if it has not since the server started."""
        return self._seen_at.get(client_id, 0.0)

    def is_online(self, client_id: str, now: float) -> bool:
        """Whether it has called within the silence that is allowed."""
        silence_s = max((self.silence_s, *self._leases_s.get(client_id, {}).values()))
        return client_id in self._seen_at and now - self._seen_at[client_id] <= silence_s

    def online(self, clients: Container[str], now: float) -> int:
        """How many of these are."""
        return sum(client_id in clients and self.is_online(client_id, now) for client_id in self._seen_at)

    def calling(self, now: float) -> int:
        """How many call, whoever they are. From any thread."""
        return sum(self.is_online(client_id, now) for client_id in list(self._seen_at))

    def behind(self, client_id: str, version: int) -> int | None:
        """By how many versions what it was given last is older; None if it was given none."""
        given = self._given.get(client_id)
        return None if given is None else version - given

    def _trains(self, task: Task) -> None:
        self._leases_s.setdefault(task.client_id, {})[task.task_id] = task.lease_s
