"""What was made lately, up to a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
VALUES_MAX = 256


class Recent(Generic[T]):
    """Values by key; the first in are the first out once there are over `bytes_max` or `VALUES_MAX`.

    For any thread without a lock: the dictionary is replaced, never written. Of two that put at the same
    time one may be forgotten, and is made again.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._values: dict[Hashable, tuple[T, int]] = {}

    def get(self, key: Hashable) -> T | None:
        """The value, or None."""
        found = self._values.get(key)
        return None if found is None else found[0]

    def put(self, key: Hashable, value: T, size_bytes: int) -> None:
        """Remember a value; one over `bytes_max` is not."""
        values = {k: v for k, v in self._values.items() if k != key}
        values[key] = (value, size_bytes)
        total = sum(size for _, size in values.values())
        while values and (total > self._bytes_max or len(values) > VALUES_MAX):
            total -= values.pop(next(iter(values)))[1]
        self._values = values


def remembered(recent: Recent[bytes], key: Hashable, make: Callable[[], bytes]) -> bytes:
    """The bytes of a key, made where they are not there; `make` must be pure."""
    found = recent.get(key)
    if found is None:
        found = make()
        recent.put(key, found, len(found))
    return found
