"""A device's own folder: its id, its outbox, and a lock, so that two agents never share them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anabranch.core.errors import ConfigError, StoreLocked, disk_error
from anabranch.core.rng import unique_id
from anabranch.protos.convert import checked_id


def device_id(state_dir: Path, given: str = "") -> str:
    """The device's id: `given`, or the one kept in the folder, or a new one; it is kept from then on.

    Raises `ConfigError` when the folder belongs to another device, `StoreError` when it cannot be used.
    """
    file = state_dir / "client_id"
    with usable(state_dir):
        known = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    if given and known and given != known:
        raise ConfigError(f"{state_dir} belongs to device {known!r}, not {given!r}: use a folder for each")
    found = checked_id(given or known or f"device-{fresh_id()[:8]}", "client_id")
    if not known:
        make_state_dir(state_dir)
        unfinished = file.with_suffix(".tmp")
        with usable(state_dir):
            unfinished.write_text(found + "\n", encoding="utf-8")
            unfinished.replace(file)
    return found


@contextmanager
def usable(state_dir: Path) -> Iterator[None]:
    """What the disk refuses inside is one error that names the folder: `StoreError`, `StoreFull`."""
    try:
        yield
    except OSError as error:
        raise disk_error(f"--state-dir {state_dir}", error) from error


def make_state_dir(state_dir: Path) -> None:
    """Make it, for its owner alone: results tell of the data behind them. Raises `StoreError`."""
    with usable(state_dir):
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)


def fresh_seed() -> int:
    """A 63-bit seed that no other process has: the ids that come of it never collide."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def fresh_id() -> str:
    """An id that no other process has."""
    return unique_id(fresh_seed(), "id")


@contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Inside, the folder is this process's own. Raises `StoreLocked`. A crash frees it."""
    make_state_dir(state_dir)
    with usable(state_dir):
        file = (state_dir / "lock").open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreLocked(f"{state_dir}: another agent uses it: give each its own --state-dir") from error
        yield
