"""When a device that waits for a place is to come back: by how often places are freed, and how long held.

Ours. With a place freed every I seconds a device with p others before it expects its turn in p I, and is told
to come back in a quarter to half of that, the first in 1/32 to 1/16 of I. A line of n devices then asks
O(log n) times for each place that is freed.

A device that is told to come late keeps its turn, and a place stays empty for it. Where tasks get shorter
meanwhile (the slow devices of a fleet have had their turn) it comes as late as the long ones made it. With
places empty fewer are freed, I gets longer, and those after it are told to come later still: a line that
does not recover. So nobody is told to stay away for longer than half a task takes in the mean, or, in a long
line, than `ASKS_PER_S` of the whole line allow.

`MINUTE` (`server.windows`) is the rule of simulations of older releases, where a minute was the only bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.core.config.ranges import TASKS
from anabranch.core.effects import Decided, Effect, Granted, LeaseEnded

NEWEST_WEIGHT = 0.1  # of the newest value in a mean
LATEST = 0.5  # of the time until a device's turn; the earliest moment of a window is at half of that
FIRST = 0.125  # of an interval, as if so much were left before the turn of the first in the line
OF_A_TASK = 0.5  # of a task's time: the latest moment of any window
ASKS_PER_S = 100.0  # of all devices in the line, if these are more than such windows make
PACE_S_MIN, PACE_S_MAX = 0.05, 60.0  # the latest moment of a window is within these


class Pace:
    """How often places are freed, and how long they are held, both in seconds; `rule`: `TASKS` or `MINUTE`.

    `heard` must see every effect of the engine.
    """

    def __init__(self, rule: str = TASKS) -> None:
        self._of_tasks = rule == TASKS
        self._interval_s: float | None = None
        self._held_s: float | None = None
        self._freed_at: float | None = None
        self._granted_at: dict[str, float] = {}  # of the tasks that hold places

    def heard(self, now: float, effects: Iterable[Effect]) -> None:
        """Take note of what an event has come to."""
        for effect in effects:
            match effect:
                case Granted(task):
                    self._granted_at.setdefault(task.task_id, now)
                case Decided(receipt=receipt, duplicate=False):
                    self._freed(now, receipt.task_id)
                case LeaseEnded(task):
                    self._freed(now, task.task_id)

    def latest_s(self, ahead: int, waiting: int) -> float | None:
        """The latest moment, from now, for one of `waiting` devices, `ahead` of them before it, if known."""
        if self._interval_s is None:
            return None
        turn_s = (ahead + FIRST) * self._interval_s
        longest_s = (
            max(OF_A_TASK * (self._held_s or 0.0), waiting / ASKS_PER_S) if self._of_tasks else PACE_S_MAX
        )
        return min(max(min(LATEST * turn_s, longest_s), PACE_S_MIN), PACE_S_MAX)

    def _freed(self, now: float, task_id: str) -> None:
        if self._freed_at is not None:
            self._interval_s = _mean(self._interval_s, now - self._freed_at)
        self._freed_at = now
        granted_at = self._granted_at.pop(task_id, None)
        if granted_at is not None:
            self._held_s = _mean(self._held_s, now - granted_at)


def _mean(before: float | None, newest: float) -> float:
    return (1 - NEWEST_WEIGHT) * (newest if before is None else before) + NEWEST_WEIGHT * newest
