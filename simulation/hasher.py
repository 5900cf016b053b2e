"""The digests of what devices push, computed while the simulation goes on."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

from anabranch.core.config.tables import Config
from anabranch.core.content import SHA256, UNNAMED, Bytes, chosen, content_digest

LARGE_BYTES = 1 << 16  # less is hashed sooner than it is handed over


class Hasher:
    """Digests of payloads, of large ones in a thread: the interpreter goes on while they are made."""

    def __init__(self, algorithm: str = SHA256) -> None:
        self._algorithm = algorithm
        self._handed: SimpleQueue[_Digest | None] = SimpleQueue()
        self._thread: Thread | None = None

    @classmethod
    def of(cls, config: Config) -> Hasher:
        """That of a run: masked updates keep to SHA-256, as live ones do."""
        return cls(SHA256 if config.secagg.on else config.run.payload_digest)

    def begin(self, payload: Bytes) -> Callable[[], str]:
        """What gives the digest, waited for if need be; an empty one in a run that names none."""
        if self._algorithm == UNNAMED:
            return str
        algorithm = chosen(self._algorithm, len(payload))
        if len(payload) < LARGE_BYTES:
            found = content_digest(payload, algorithm)
            return lambda: found
        if self._thread is None:
            self._thread = Thread(target=self._work, name="hasher", daemon=True)
            self._thread.start()
        digest = _Digest(payload, algorithm)
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

    __slots__ = ("_algorithm", "_made", "_payload", "_text", "_why")

    def __init__(self, payload: Bytes, algorithm: str) -> None:
        self._payload, self._algorithm, self._text, self._made = payload, algorithm, "", Lock()
        self._why: Exception | None = None
        self._made.acquire()

    def make(self) -> None:
        """Raises nothing, or the thread would end and who waits wait for ever."""
        try:
            self._text = content_digest(self._payload, self._algorithm)
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self._why = error
        self._payload = b""
        self._made.release()

    def wait(self) -> str:
        """Raises what making it did."""
        if not self._text:
            with self._made:
                pass
        if self._why is not None:
            raise self._why
        return self._text
