"""When a device that waits for a place is to come back: by how often places are freed, and how long held.

| symbol | name     | meaning                                                                               |
|--------|----------|---------------------------------------------------------------------------------------|
| p      | ahead    | devices whose turn comes before this one's                                            |
| I      | interval | seconds from one freed place to the next, a mean of which the newest is a tenth       |
| H      | held     | seconds for which a place is held, a mean of the same kind                            |
| T      | task     | the same of those alone whose task came to an update                                  |
| D      | off      | seconds by which these are off T, again such a mean                                   |
| q      | quick    | T - 2 D: what a quick task takes; 0 before the first update, and where nobody knows   |
|        |          | how many places there are: a strategy's own cap may not say (`Refusal.places`)        |
| g_k    | since    | since when places are held, the longest held one first: g_0, g_1, ...                 |
| e      |          | places that are free, as those whose they are have not come back yet                  |
| t      | overdue  | seconds since a place was freed last, or since g_0 + q if that is later               |

Of the places that are held, p - e are others' before one is this device's. It expects its turn after the
longest of

    (p + 1/8) I               places are freed one after the other
    g_(p - e) + q - now       no task is quicker than quick ones; where fewer places than that are held: q
    t / 16                    nothing has come for so long, whatever was to be expected

and is told to come back in a quarter to half of that. A line of n devices then asks O(log n) times for each
place that is freed. Without the last two, devices of one speed that are called together make a herd: their
places are freed at one moment, I is near zero after it, and all who wait ask as often as they may until the
next place is freed, a whole task later. The second says when that can be. While places are freed steadily it
is not the longest, whatever tasks take: where a share x of the places has been held for longer than a, a task
lasts beyond a for x H in the mean, and for H - a at least. The third bounds what a wrong guess of q costs,
and is all there is before the first update. A lease that ends says nothing of how quick tasks are.

A device that is told to come late keeps its turn, and a place stays empty for it. Where tasks get shorter
meanwhile (the slow devices of a fleet have had their turn) it comes as late as the long ones made it. With
places empty fewer are freed, I gets longer, and those after it are told to come later still: a line that
does not recover. So nobody is told to stay away for longer than half a task takes in the mean, or, in a long
line, than `ASKS_PER_S` of the whole line allow.

That is the rule `PLACES`. The others (`server.windows`) are those of simulations of older releases: `TASKS`
has the first of the three alone, and where `MINUTE` is the rule a minute is the only bound.

T - 2 D is from the timers of TCP: Jacobson, Congestion Avoidance and Control, SIGCOMM 1988, has the mean
and four mean deviations for the latest moment. The rest is ours.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable

from anabranch.core.config.ranges import MINUTE, PLACES
from anabranch.core.effects import Decided, Effect, Granted, LeaseEnded

NEWEST_WEIGHT = 0.1  # of the newest value in a mean
LATEST = 0.5  # of the time until a device's turn; the earliest moment of a window is at half of that
FIRST = 0.125  # of an interval, as if so much were left before the turn of the first in the line
QUICK = 2.0  # mean deviations by which a quick task is shorter than the mean of all
OVERDUE = 0.0625  # of the time by which the next place is overdue, as if so much were left
OF_A_TASK = 0.5  # of a task's time: the latest moment of any window
ASKS_PER_S = 100.0  # of all devices in the line, if these are more than such windows make
PACE_S_MIN, PACE_S_MAX = 0.05, 60.0  # the latest moment of a window is within these


class Pace:
    """How often places are freed, since when and for how long they are held: seconds of the server's clock.

    `rule`: `PLACES`, `TASKS` or `MINUTE`. `heard` must see every effect of the engine.
    """

    def __init__(self, rule: str = PLACES) -> None:
        self._rule = rule
        self._interval_s: float | None = None
        self._held_s: float | None = None
        self._task_s: float | None = None
        self._off_s = 0.0
        self._freed_at = -math.inf
        self._granted_at: dict[str, float] = {}  # of the tasks that hold places
        self._held_since: list[float] = []  # the same moments, in order

    def heard(self, now: float, effects: Iterable[Effect]) -> None:
        """Take note of what an event has come to."""
        for effect in effects:
            match effect:
                case Granted(task) if task.task_id not in self._granted_at:
                    self._granted_at[task.task_id] = now
                    insort(self._held_since, now)
                case Decided(receipt=receipt, duplicate=False):
                    self._freed(now, receipt.task_id, is_done=True)
                case LeaseEnded(task):
                    self._freed(now, task.task_id)

    def window_s(
        self, now: float, ahead: int, waiting: int, places: int, at_first_s: tuple[float, float]
    ) -> tuple[float, float]:
        """When one of `waiting` devices, `ahead` of them before it, is to come back: seconds from now.

        `places`: for how many tasks at a time, 0: not known. `at_first_s`: the answer until more is known.
        """
        is_known = self._interval_s is not None
        if not is_known and self._rule != PLACES:
            return at_first_s
        turn_s = (ahead + FIRST) * (self._interval_s or 0.0)
        if self._rule == PLACES:
            turn_s = max(turn_s, self._not_before_s(now, ahead, places))
        latest_s = min(LATEST * turn_s, self._longest_s(now, waiting), PACE_S_MAX)
        if not is_known and latest_s <= at_first_s[1]:
            return at_first_s
        latest_s = max(latest_s, PACE_S_MIN)
        return latest_s / 2.0, latest_s

    def _not_before_s(self, now: float, ahead: int, places: int) -> float:
        """For how long who has so many ahead is expected to have none of `places` (0: not known how many)."""
        held = self._held_since
        if not held:
            return 0.0
        quick_s = max(0.0, (self._task_s or 0.0) - QUICK * self._off_s) if places else 0.0
        overdue_s = now - max(self._freed_at, held[0] + quick_s)
        nth = ahead - (places - len(held))
        if not places or nth < 0:
            return OVERDUE * overdue_s
        since = held[nth] if nth < len(held) else now
        return max(OVERDUE * overdue_s, since + quick_s - now)

    def _longest_s(self, now: float, waiting: int) -> float:
        """The latest moment of any window, from now."""
        if self._rule == MINUTE:
            return PACE_S_MAX
        held_s = self._held_s
        if held_s is None:  # then a task takes as long as the oldest has taken so far
            held_s = now - self._held_since[0] if self._held_since and self._rule == PLACES else 0.0
        return max(OF_A_TASK * held_s, waiting / ASKS_PER_S)

    def _freed(self, now: float, task_id: str, is_done: bool = False) -> None:
        if self._freed_at > -math.inf:
            self._interval_s = _mean(self._interval_s, now - self._freed_at)
        self._freed_at = now
        granted_at = self._granted_at.pop(task_id, None)
        if granted_at is not None:
            del self._held_since[bisect_left(self._held_since, granted_at)]
            held_s = now - granted_at
            self._held_s = _mean(self._held_s, held_s)
            if is_done:
                self._task_s = _mean(self._task_s, held_s)
                self._off_s = _mean(self._off_s, abs(held_s - self._task_s))


def _mean(before: float | None, newest: float) -> float:
    return (1 - NEWEST_WEIGHT) * (newest if before is None else before) + NEWEST_WEIGHT * newest
