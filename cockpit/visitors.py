"""Who may look: one-time links, and the sessions that they begin."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

SESSION_S = 12 * 3600.0  # without a request
SESSIONS_MAX = 64


@dataclass
class Visitor:
    """Somebody who came by a link. `csrf` goes with every order."""

    number: int
    csrf: str
    seen_at: float


class Visitors:
    """Links and sessions, by the digests of their secrets: what a dump of memory has, opens nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._links: set[bytes] = set()
        self._sessions: dict[bytes, Visitor] = {}
        self._numbers = itertools.count(1)

    def link(self) -> str:
        """The secret of a link that begins one session."""
        secret = secrets.token_urlsafe(32)
        with self._lock:
            self._links.add(_digest(secret))
        return secret

    def enter(self, link: str) -> str | None:
        """The secret of a new session, if the link was not used before; of many the oldest goes."""
        digest, secret = _digest(link), secrets.token_urlsafe(32)
        with self._lock:
            if digest not in self._links:
                return None
            self._links.remove(digest)
            while len(self._sessions) >= SESSIONS_MAX:
                del self._sessions[min(self._sessions, key=lambda s: self._sessions[s].seen_at)]
            session = Visitor(next(self._numbers), secrets.token_urlsafe(32), self._clock())
            self._sessions[_digest(secret)] = session
        return secret

    def find(self, secret: str) -> Visitor | None:
        """The session of a cookie, if it is still there."""
        digest, now = _digest(secret), self._clock()
        with self._lock:
            session = self._sessions.get(digest)
            if session is None or now - session.seen_at > SESSION_S:
                self._sessions.pop(digest, None)
                return None
            session.seen_at = now
            return session

    def leave(self, secret: str) -> None:
        """End a session."""
        with self._lock:
            self._sessions.pop(_digest(secret), None)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
