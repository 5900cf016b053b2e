"""Of a process that was forked: what its copy must leave alone.

The copy has one thread, the one that forked. It has every open file, and holds its lock for as long as it
lives, also once the process that locked is dead; and it runs what was to run at the end of that.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anabranch.core.errors import ConfigError

_alone: set[int] = set()  # descriptors
_speaking: set[object] = set()  # who uses gRPC
_copied_amid = False


def keep_from_copies(descriptor: int) -> None:
    """Whoever is forked does not hold the open file of a lock; until `give_back`, before it is closed."""
    _alone.add(descriptor)


def give_back(descriptor: int) -> None:
    """Its number may be another file's from now on."""
    _alone.discard(descriptor)


@contextmanager
def kept_from_copies(descriptor: int) -> Iterator[None]:
    """The same, inside."""
    keep_from_copies(descriptor)
    try:
        yield
    finally:
        give_back(descriptor)


def remove_at_the_end(holder: object, folder: Path) -> weakref.finalize[..., object]:
    """Remove a folder once nobody has `holder`, or this process ends, and not where a copy of it does."""
    return weakref.finalize(holder, _remove, folder, os.getpid())


def _remove(folder: Path, maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)


def check_may_speak() -> None:
    """Raises `ConfigError` in the copy of a process in which somebody was `speaking`.

    One in some such copies waits for ever at its first call, for threads of gRPC's that it has not, and no
    deadline ends that.
    """
    if _copied_amid:
        raise ConfigError(
            "this process was forked from one that spoke to a server, and gRPC may wait for ever in such a "
            "copy: fork before the first joins, or begin another by subprocess or multiprocessing's 'spawn'"
        )


@contextmanager
def speaking() -> Iterator[None]:
    """Inside, somebody speaks to a server by gRPC."""
    who = object()
    _speaking.add(who)
    try:
        yield
    finally:
        _speaking.discard(who)


def _in_the_copy() -> None:
    """The numbers lead to nothing from now on, so that whoever closes them closes no other file."""
    global _copied_amid  # noqa: PLW0603 - a process is a copy, or is none
    _copied_amid = _copied_amid or bool(_speaking)
    with suppress(OSError):  # without a file to put there, the locks stay with the copy
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in _alone:
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
    _alone.clear()


os.register_at_fork(after_in_child=_in_the_copy)
