"""A deadline that is moved with every message, which is seldom due."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Deadline:
    """As `asyncio.timeout_at`, whose timer is set anew with every move; this one's stays where it is.

    When the timer is due it looks whether the deadline was moved, and goes on to there. For one task at a
    time, which may come again and again; `close` lets the timer go.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._when: float | None = None  # None: nobody is inside
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0  # what others had asked of the task before
        self.expired = False

    def until(self, when: float) -> Deadline:
        """To be entered: inside is what may last until then, by the event loop's clock."""
        self._when = when
        return self

    def move(self, when: float) -> None:
        """What is inside may last until then; of no use once it has expired, or to who is outside."""
        if self._when is not None and not self.expired:
            self._when = when
            self._set(when)

    def close(self) -> None:
        """It is not entered any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> Deadline:
        task = asyncio.current_task()
        assert task is not None, "a task enters"
        assert self._when is not None, "and says until when"
        self._task, self._cancelling, self.expired = task, task.cancelling(), False
        self._set(self._when)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises `TimeoutError` in the place of its own cancellation."""
        task, self._task, self._when = self._task, None, None
        if task is None or not self.expired:
            return
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _set(self, when: float) -> None:
        """A timer that is due by then, though it may come early."""
        if self._timer is None or when < self._timer.when():
            self.close()
            self._timer = self._loop.call_at(when, self._due, when)

    def _due(self, at: float) -> None:
        self._timer = None
        if self._when is None or self.expired:
            return
        if self._when > at:
            self._set(self._when)
            return
        assert self._task is not None, "somebody is inside"
        self.expired = True
        self._task.cancel()
