"""The digests of what devices push, computed while the simulation goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

LARGE_BYTES = 1 << 16  # less is hashed sooner than it is handed over


class Hasher:
    """SHA-256 of payloads, of large ones in a thread: hashlib lets the interpreter go on meanwhile."""

    def __init__(self) -> None:
        self._handed: SimpleQueue[_Digest | None] = SimpleQueue()
        self._thread: Thread | None = None

    def begin(self, payload: bytes) -> Callable[[], str]:
        """What gives the digest, waited for if need be."""
        if len(payload) < LARGE_BYTES:
            found = _sha256(payload)
            return lambda: found
        if self._thread is None:
            self._thread = Thread(target=self._work, name="hasher", daemon=True)
            self._thread.start()
        digest = _Digest(payload)
        self._handed.put(digest)
        return digest.wait

    def close(self) -> None:
        """End the thread, after what it was handed."""
        if self._thread is not None:
            self._handed.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (digest := self._handed.get()) is not None:
            digest.make()


class _Digest:
    """One that a thread makes: a lock that is held until it is there costs a tenth of what a Future does."""

    __slots__ = ("_made", "_payload", "_text")

    def __init__(self, payload: bytes) -> None:
        self._payload, self._text, self._made = payload, "", Lock()
        self._made.acquire()

    def make(self) -> None:
        self._text, self._payload = _sha256(self._payload), b""
        self._made.release()

    def wait(self) -> str:
        if not self._text:
            with self._made:
                pass
        return self._text


def _sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()
