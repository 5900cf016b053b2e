"""Time that passes only when somebody rests."""

from __future__ import annotations

from anabranch.client.stopping import Bell


class VirtualTime:
    """A clock and the bell that moves it; `rests` remembers every rest, in seconds."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self.rests: list[float] = []
        self.bell = Bell(self.now, self._rest)

    def now(self) -> float:
        return self._now

    def pass_s(self, seconds: float) -> None:
        self._now += seconds

    def _rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self._now += seconds
