"""Keeps the process from holding on to memory that it freed."""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8  # glibc's malloc.h
ARENAS = 2


def bound_heap() -> None:
    """Let glibc use few arenas: by default every thread's own one keeps the buffers it once needed.

    Does nothing where there is no glibc. `MALLOC_ARENA_MAX` in the environment does the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)
