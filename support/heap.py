"""How the process holds on to memory that it freed: a server briefly, a simulation as long as it runs."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
PR_SET_THP_DISABLE = 41  # Linux's prctl.h
ARENAS = 2
MAPPED_BYTES_MIN = 32 << 20  # the most that glibc takes
FREE_BYTES_MAX = 128 << 20  # at the end of the heap
FROZEN_BEFORE = gc.get_freeze_count()  # not by this module: Python 3.12 begins with some


def bound_heap() -> None:
    """Let glibc use few arenas: by default every thread's own one keeps the buffers it once needed.

    Does nothing where there is no glibc. `MALLOC_ARENA_MAX` in the environment does the same.
    """
    _call("mallopt", M_ARENA_MAX, ARENAS)


def use_small_pages() -> None:
    """Have the process, and those that it starts, take memory in pages of 4 KiB; numpy asks for 2 MiB.

    To find and clear a large page can take milliseconds, in whatever thread writes to it first: a fresh array
    of 40 MB took 85 ms of processor time with large pages, and 19 without, on a virtual machine that gives
    what it does not use back to its host. Does nothing where there is no Linux.
    """
    if sys.platform == "linux":
        _call("prctl", PR_SET_THP_DISABLE, *map(ctypes.c_ulong, (1, 0, 0, 0)))


def trim_heap() -> None:
    """Give free memory back: after a flood of uploads the heap is full of holes. Takes milliseconds.

    (To have glibc map large blocks one by one would do the same at once, but makes every array that is made
    and dropped many times slower.)
    """
    _call("malloc_trim", 0)


def reuse_heap() -> None:
    """Have arrays of up to 32 MiB made of memory that others were in before.

    By default glibc gives what such an array took back to the kernel, which fills each page anew with zeros
    when the next one is written: for an array of 0.4 MB that is ten times the work of copying it.
    """
    _call("mallopt", M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
    _call("mallopt", M_TRIM_THRESHOLD, FREE_BYTES_MAX)


@contextmanager
def reused_heap() -> Iterator[None]:
    """The same; what is free in the end is given back."""
    reuse_heap()
    try:
        yield
    finally:
        trim_heap()


@contextmanager
def uncollected() -> Iterator[None]:
    """While modules are imported, which stay: to look for what of them could go is a tenth of a start.

    Nor is that looked for later. For a process that begins with this, the collector disabled, and for what it
    imports after that; in any other, whose collector is its own affair, nothing is done.
    """
    _Frozen.begun |= not gc.isenabled()
    if not _Frozen.begun:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # Python counts all that is frozen, one by one: where others froze a suite of tests, that takes 50 ms.
        _Frozen.count += len(gc.get_objects())
        gc.freeze()
        gc.enable()


def frozen_by_others() -> bool:
    """Whether objects were frozen besides Python's own and what was imported in `uncollected`."""
    return gc.get_freeze_count() > _Frozen.count


def unfreeze() -> None:
    """Nothing is frozen from now on, Python's own and what was imported in `uncollected` neither."""
    gc.unfreeze()
    _Frozen.count = 0


class _Frozen:
    """What `uncollected` has frozen."""

    begun = False  # whether this process begins with it
    count = FROZEN_BEFORE


def _call(name: str, *arguments: int | ctypes.c_ulong) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
