"""How often each of many does something: a leaky bucket for each, and no more of them than fit."""

from __future__ import annotations

from collections import OrderedDict

KEPT = 4096


class Rates:
    """A bucket holds `at_once` and loses `per_minute` a minute.

    The `kept` that came last are remembered, so its size is bounded whoever comes.
    """

    def __init__(self, per_minute: float, at_once: float, kept: int = KEPT) -> None:
        self._per_minute, self._at_once, self._kept = per_minute, at_once, kept
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()  # (level, when)

    def __len__(self) -> int:
        return len(self._levels)

    def wait_s(self, who: str, now: float) -> float:
        """For how long this one must wait, in seconds; 0: not at all."""
        over = self._level(who, now) - self._at_once + 1
        return max(0.0, over * 60 / self._per_minute)

    def add(self, who: str, now: float) -> None:
        """This one has done it."""
        self._levels[who] = (self._level(who, now) + 1, now)
        self._levels.move_to_end(who)
        if len(self._levels) > self._kept:
            self._levels.popitem(last=False)

    def take(self, who: str, now: float) -> float:
        """`wait_s`; where that is nothing this one does it."""
        wait_s = self.wait_s(who, now)
        if not wait_s:
            self.add(who, now)
        return wait_s

    def _level(self, who: str, now: float) -> float:
        level, when = self._levels.get(who, (0.0, now))
        return max(0.0, level - max(0.0, now - when) * self._per_minute / 60)
