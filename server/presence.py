"""Who has called since the server started, and which version each was given last: for operators to look at.

It is of this process alone: nothing is decided by it, and the log has nothing of it.
"""

from __future__ import annotations

from collections.abc import Container


class Presence:
    """For the event loop's thread. `silence_s`: who has said nothing for longer is not online."""

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._seen_at: dict[str, float] = {}
        self._given: dict[str, int] = {}

    def seen(self, client_id: str, now: float) -> None:
        """A client has called."""
        self._seen_at[client_id] = now

    def given(self, client_id: str, version: int) -> None:
        """A client trains from this version."""
        self._given[client_id] = version

    def seen_at(self, client_id: str) -> float:
        """When it called last, in seconds since 1970; 0 if it has not since the server started."""
        return self._seen_at.get(client_id, 0.0)

    def is_online(self, client_id: str, now: float) -> bool:
        """Whether it has called within the silence that is allowed."""
        return client_id in self._seen_at and now - self._seen_at[client_id] <= self.silence_s

    def online(self, clients: Container[str], now: float) -> int:
        """How many of these are."""
        return sum(client_id in clients and self.is_online(client_id, now) for client_id in self._seen_at)

    def calling(self, now: float) -> int:
        """How many call, whoever they are. From any thread."""
        earliest = now - self.silence_s
        return sum(at >= earliest for at in list(self._seen_at.values()))

    def behind(self, client_id: str, version: int) -> int | None:
        """By how many versions what it was given last is older; None if it was given none."""
        given = self._given.get(client_id)
        return None if given is None else version - given
