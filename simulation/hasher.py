"""The digests of what devices push, computed while the simulation goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

LARGE_BYTES = 1 << 16  # less is hashed sooner than it is handed over


class Hasher:
    """SHA-256 of payloads, of large ones in a thread: hashlib lets the interpreter go on meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "hasher")

    def begin(self, payload: bytes) -> Callable[[], str]:
        """What gives the digest, waited for if need be."""
        if len(payload) < LARGE_BYTES:
            found = _sha256(payload)
            return lambda: found
        return self._thread.submit(_sha256, payload).result

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


def _sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()
