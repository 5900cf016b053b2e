"""A device's own folder: its id, its outbox, and a lock, so that two agents never share them."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from anabranch.client.records import SUFFIX
from anabranch.core.errors import ConfigError, InvalidUpdate, StoreError, StoreLocked, disk_error
from anabranch.core.ids import checked_id, typed_id
from anabranch.core.rng import unique_id
from anabranch.identity.files import private, tighten
from anabranch.support.forks import kept_from_copies
from anabranch.support.held import leads_to
from anabranch.support.holders import forget_holder, holder_of, note_holder

log = logging.getLogger(__name__)

# In a device's folder, what belongs to the versions of a run.
OUTBOX, MEMORY, KEPT, HELD = "outbox", "memory", "kept", f"held{SUFFIX}"

JOBS = "jobs"  # a folder for each job, with a device's state in each
FROZEN = "frozen"  # tensors that no version changes, by their digest
SESSION = "session"  # the name of the last process that worked with the folder
OURS = (OUTBOX, MEMORY, KEPT, HELD, FROZEN, SESSION, "client_id", "lock")

MADE_UP = re.compile("device-[0-9a-f]{8}")  # the name of a device that was given none
UNNAMED_DEVICE = Path("anabranch-device")  # the folder of a device without a name
NAMED_DEVICES = Path("anabranch-devices")  # in it: those of others, by their names


def state_dir_of(client_id: str) -> Path:
    """Where a device has its state if nobody says where: `anabranch-devices/ID`, or `anabranch-device`.

    The latter for one without a name, and for the one whose state is there already.
    """
    if not client_id or client_id == _kept_id(UNNAMED_DEVICE):
        return UNNAMED_DEVICE
    return NAMED_DEVICES / typed_id(client_id, "--id")


def device_id(state_dir: Path, given: str = "") -> str:
    """The device's id: `given`, or the one kept in the folder, or a new one; it is kept from then on.

    One that was made up at a start that came to nothing, for want of a token say, gives way to `given`.
    Raises `ConfigError` when the folder belongs to another device or `given` is no name, `StoreError` when
    the folder cannot be used.
    """
    named = typed_id(given, "--id") if given else f"device-{fresh_id()[:8]}"
    known = _kept_id(state_dir)
    if not known or (given and given != known and _came_to_nothing(state_dir, known)):
        known = _keep_id(state_dir, named, known)
    if given and given != known:
        raise ConfigError(f"{state_dir} belongs to device {known!r}, not {given!r}: use a folder for each")
    return checked_id(known, "client_id")


def _kept_id(state_dir: Path) -> str:
    """Raises `ConfigError` for a file that holds no name."""
    file = state_dir / "client_id"
    with usable(state_dir):
        said = file.read_bytes() if file.exists() else b""
    try:
        known = said.decode("utf-8").strip()
        return checked_id(known, "client_id") if known else ""
    except (UnicodeDecodeError, InvalidUpdate) as error:
        raise ConfigError(
            f"{file} is damaged, it holds no name: remove it (papers have the name, else give it by --id)"
        ) from error


def settled_id(state_dir: Path) -> str:
    """The id that a folder keeps and that gives way to no other, "" where there is none."""
    known = _kept_id(state_dir)
    return "" if not known or _came_to_nothing(state_dir, known) else known


def _came_to_nothing(state_dir: Path, client_id: str) -> bool:
    """Whether a name was made up here, and nothing that was done under it is left."""
    with usable(state_dir):
        folders = (state_dir / name for name in (OUTBOX, MEMORY, KEPT, FROZEN, JOBS))
        work = [state_dir / HELD, *(path for folder in folders for path in folder.rglob("*"))]
        return MADE_UP.fullmatch(client_id) is not None and not any(path.is_file() for path in work)


def _keep_id(state_dir: Path, client_id: str, before: str) -> str:
    """Keep an id in a folder in the place of `before`; returns another process's, where that was first."""
    checked_id(client_id, "client_id")
    with locked(state_dir), usable(state_dir):
        known = _kept_id(state_dir)
        if known != before or (before and not _came_to_nothing(state_dir, before)):
            return known
        unfinished = state_dir / "client_id.tmp"
        with open(unfinished, "w", encoding="utf-8", opener=private) as file:
            file.write(client_id + "\n")
        unfinished.replace(state_dir / "client_id")
    return client_id


@contextmanager
def usable(state_dir: Path) -> Iterator[None]:
    """What the disk refuses inside is one error that names the folder: `StoreError`, `StoreFull`."""
    try:
        yield
    except OSError as error:
        raise disk_error(f"--state-dir {state_dir}", error) from error


def make_state_dir(state_dir: Path) -> None:
    """A folder for its owner alone, though it was there: results tell of the data behind them.

    Raises `StoreError`.
    """
    with usable(state_dir):
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = [state_dir / name for name in OURS]
        tighten(state_dir, *known, *(path for folder in known for path in folder.glob("*")))


def fresh_seed() -> int:
    """A 63-bit seed that no other process has: the ids that come of it never collide."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def fresh_id() -> str:
    """An id that no other process has."""
    return unique_id(fresh_seed(), "id")


def forget_run(state_dir: Path) -> None:
    """Remove what belongs to versions: the held model, results, their memory. Raises `StoreError`.

    The device's id, its papers and what it has seen of the run's history stay.
    """
    with locked(state_dir), usable(state_dir):
        for folder in (OUTBOX, MEMORY, KEPT):
            if (state_dir / folder).exists():
                shutil.rmtree(state_dir / folder)
        (state_dir / HELD).unlink(missing_ok=True)


@contextmanager
def locked(state_dir: Path) -> Iterator[Callable[[], None]]:
    """Inside, the folder is this process's own. Raises `StoreLocked`. A crash frees it.

    What it gives raises `StoreError` where the folder's name leads to another one by now, or to none.
    """
    make_state_dir(state_dir)
    with usable(state_dir):
        file = open(state_dir / "lock", "a+", opener=private)  # noqa: SIM115 - closed below
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = holder_of(file.fileno())
            named = f" (process {holder})" if holder else ""
            raise StoreLocked(
                f"{state_dir}: another device{named} has its state there: start each with a name of its own, "
                "--id device-0, or with a --state-dir of its own"
            ) from error
        with kept_from_copies(file.fileno()):
            note_holder(file.fileno(), state_dir, log)
            try:
                yield partial(_check_lock, state_dir, file)
            finally:
                forget_holder(file.fileno())


def _check_lock(state_dir: Path, held: IO[Any]) -> None:
    """Writing on would make another folder where the device's own is to be put back."""
    with usable(state_dir):
        if leads_to(state_dir / "lock", os.fstat(held.fileno())):
            return
    raise StoreError(
        f"{state_dir} is not the folder that this device began with: it was moved, replaced or removed while "
        "the device worked, or its `lock` was; put it back, or else it begins anew with its next start"
    )
