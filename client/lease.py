"""Keeping a lease: heartbeats with progress from a thread of their own, and the notices they bring."""

from __future__ import annotations

from collections.abc import Callable, Collection

from anabranch.client.messages import NoticeKind
from anabranch.client.pulse import Pulse
from anabranch.client.stopping import Bell
from anabranch.client.telling import OnEvent, tell_failed
from anabranch.client.transport import Transport
from anabranch.core.errors import AnabranchError
from anabranch.core.model.updates import Task


class Cancelled(BaseException):
    """The task at hand is no longer wanted. No `Exception`: an App's own `except` must not eat it."""


class WorkProgress:
    """A number that grows as the work does, so that a lease is renewed for work and not for hanging.

    Local steps where the training loop reports them; seconds where it does not, and outside training.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._done = 0.0
        self._since: float | None = None

    def begin(self) -> None:
        """Seconds count from now on."""
        self._settle()
        self._since = self._clock()

    def step(self) -> None:
        """A local step begins: from now on steps count."""
        self._settle()
        self._done += 1.0

    def value(self) -> float:
        """The progress so far."""
        since = self._since
        return self._done + (0.0 if since is None else self._clock() - since)

    def _settle(self) -> None:
        since, self._since = self._since, None
        if since is not None:
            self._done += self._clock() - since


class LeaseKeeper:
    """Calls `beat` in a thread of its own when `pulse` says so, and knows which tasks are not wanted."""

    def __init__(self, transport: Transport, beat: Callable[[], None], bell: Bell, tell: OnEvent) -> None:
        self._transport, self._bell, self._tell = transport, bell, tell
        self.pulse = Pulse(beat, bell.now)
        self._unwanted: set[str] = set()
        self._failing = ""  # how heartbeats fail, which is told once
        self.progress = WorkProgress(bell.now)

    def check(self, task_id: str) -> None:
        """Raises `Cancelled` once a notice has said that this task is not wanted."""
        if task_id in self._unwanted:
            raise Cancelled

    def take_unwanted(self) -> Collection[str]:
        """The tasks that are not wanted, told once."""
        if not self._unwanted:
            return self._unwanted
        task_ids, self._unwanted = self._unwanted, set()
        return task_ids

    def renew(self, task: Task) -> list[NoticeKind]:
        """Send a heartbeat; what its answer says of this task, or of the whole run."""
        try:
            answer = self._transport.heartbeat(task.task_id, self.progress.value())
        except AnabranchError as error:
            before, self._failing = self._failing, type(error).__name__
            if before != self._failing:
                tell_failed(self._tell, "heartbeat", error)
            return []
        self._failing = ""
        return [notice.kind for notice in answer.notices if notice.task_id in ("", task.task_id)]

    def end(self, task_id: str) -> None:
        """This task is not wanted: work at it ends."""
        self._unwanted.add(task_id)
        self._bell.ring()
