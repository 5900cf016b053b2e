"""Keeps the process from holding on to memory that it freed."""

from __future__ import annotations

import ctypes

from anabranch.core.limits import KIB

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # glibc's malloc.h
ARENAS = 2
# What uploads take goes back to the system when it is freed. Left alone, this bound grows to the largest
# block ever freed, up to 32 MiB: after a flood the heap is full of holes.
MAPPED_FROM_BYTES = 32 * KIB


def bound_heap() -> None:
    """Let glibc use few arenas, and give large blocks back: by default it keeps what was once needed.

    Does nothing where there is no glibc. `MALLOC_ARENA_MAX` in the environment does the first, too.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
