"""What is said once by a program, however many runs it has, and however many processes carry them out."""

from __future__ import annotations

from hashlib import blake2b
from multiprocessing.context import BaseContext
from multiprocessing.sharedctypes import SynchronizedArray
from typing import TypeAlias

Numbers: TypeAlias = "SynchronizedArray[int]"
SHARED_MAX = 256  # of more texts each process says its own


class Said:
    """Which texts were said, as numbers, so that processes can share them."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        self._shared: Numbers | None = None

    def shared_by(self, context: BaseContext) -> Numbers:
        """What worker processes are handed at their start, to `share` what is said from now on."""
        if self._shared is None:
            self._shared = context.Array("Q", SHARED_MAX)
        return self._shared

    def share(self, numbers: Numbers) -> None:
        """In a worker process: what another one has said is not new here."""
        self._shared = numbers

    def is_new(self, text: str) -> bool:
        """Whether nobody has said it; from now on somebody has."""
        number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
        if number in self._own:
            return False
        self._own.add(number)
        return self._shared is None or _added(self._shared, number)

    def forget(self) -> None:
        """All of it is new again."""
        self._own.clear()
        self._shared = None


def _added(shared: Numbers, number: int) -> bool:
    """Whether it was not there. A 0 is a place that is free."""
    with shared.get_lock():
        numbers: list[int] = shared[:]
        if number in numbers:
            return False
        if 0 in numbers:
            shared[numbers.index(0)] = number
    return True
