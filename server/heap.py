"""Keeps the process from holding on to memory that it freed."""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8  # glibc's malloc.h
ARENAS = 2


def bound_heap() -> None:
    """Let glibc use few arenas: by default every thread's own one keeps the buffers it once needed.

    Does nothing where there is no glibc. `MALLOC_ARENA_MAX` in the environment does the same.
    """
    _call("mallopt", M_ARENA_MAX, ARENAS)


def trim_heap() -> None:
    """Give free memory back: after a flood of uploads the heap is full of holes. Takes milliseconds.

    (To have glibc map large blocks one by one would do the same at once, but makes every array that is made
    and dropped many times slower.)
    """
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
