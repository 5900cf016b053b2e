"""When each version of a live run came, and what had been counted then: for trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anabranch.core.effects import Effect, Published
from anabranch.reports.tracking.run import Moment

KEPT = 1000  # versions; followers measure the newest


class Moments:
    """For the event loop's thread. `counts`: updates so far, bytes up, bytes down."""

    def __init__(self, begun_at: float, counts: Callable[[], tuple[int, int, int]]) -> None:
        self._begun_at, self._counts = begun_at, counts
        self._kept: dict[int, Moment] = {}

    def hear(self, now: float, effects: Sequence[Effect]) -> None:
        """Note the versions among effects."""
        for effect in effects:
            if isinstance(effect, Published):
                self._kept[effect.version] = self._moment(effect.version, now)
                if len(self._kept) > KEPT:
                    del self._kept[next(iter(self._kept))]

    def of(self, version: int, now: float) -> Moment:
        """Of a version; of one of before it is that of now."""
        return self._kept.get(version) or self._moment(version, now)

    def _moment(self, version: int, now: float) -> Moment:
        return Moment(version, now - self._begun_at, *self._counts())
