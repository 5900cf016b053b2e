"""Where a run goes: a folder is one run's, and never another's."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

from anabranch.core.errors import ConfigError, DataError, FolderMissing
from anabranch.reports.journal_files import JOURNAL
from anabranch.reports.recorder import EVENTS_FILE
from anabranch.reports.result import RESULT_FILE, Result
from anabranch.support.forks import kept_from_copies
from anabranch.support.held import leads_to

log = logging.getLogger(__name__)

SEARCH_FILE = "search.json"
TRIALS_FILE = "trials.jsonl"  # of a tuning
FRESH_RUNS = "fresh"  # the folder of those that measure its recommendation
CHECKPOINT = "checkpoint.sqlite"  # of a simulation that has not ended: it can go on
LIVE_DATA = "server"  # the data directory of a demo's server
MARKS = (RESULT_FILE, JOURNAL, EVENTS_FILE, SEARCH_FILE, TRIALS_FILE, LIVE_DATA)


class FolderBusy(ConfigError):
    """Another process is at work in the folder."""


def holds_run(folder: Path) -> bool:
    """Whether a run lies there, whole or not."""
    return any((folder / name).exists() for name in MARKS)


def need_free(folder: Path) -> None:
    """Raises `ConfigError` where a run lies in the folder already."""
    if holds_run(folder):
        goes_on = ", go on with it by --resume (resume=True)" if (folder / CHECKPOINT).exists() else ""
        raise ConfigError(
            f"{folder} holds a run already, and runs are never overwritten: "
            f"name another folder with --out (out=){goes_on}, or move that one away"
        )


def has_ended(folder: Path) -> bool:
    """Whether a run came to its end there."""
    try:
        return Result.read(folder).status == "finished"
    except DataError:
        return (folder / RESULT_FILE).exists()  # of another version of this program, perhaps


def numbered(folder: Path) -> Iterator[Path]:
    """The folder, then `-2`, `-3` and so on behind its name."""
    yield folder
    for number in count(2):
        yield folder.with_name(f"{folder.name}-{number}")


@contextlib.contextmanager
def claimed(folder: Path, explicit: bool, resume: bool = False) -> Iterator[Path]:
    """A folder of its own for a run: this one if it must be, else the first of its name that is free.

    With `resume` it is this one, and may hold a run: whose, the caller finds out.

    It is made at once, so that two that begin together get two; and it goes if nothing is written into it.
    Raises `ConfigError` where an `explicit` folder holds a run.
    """
    new = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # said of the folder that was asked for
        raise _no_folder(folder) from error
    if explicit or resume:
        if folder.exists() and not folder.is_dir():
            raise _no_folder(folder)
        if not resume:
            need_free(folder)
        new = [folder, *new] if _made(folder) else new
    else:
        folder = next(f for f in numbered(folder) if _made(f))
        new = [folder, *new]
    new = [made.absolute() for made in new]  # the run may change the working directory
    try:
        yield folder
    except FolderBusy:
        new = []  # whoever is in it may not have written anything yet
        raise
    finally:
        with contextlib.suppress(OSError):  # there is something in it
            for made in new:
                made.rmdir()


@contextlib.contextmanager
def locked(folder: Path, what: str) -> Iterator[Callable[[], None]]:
    """The folder, made if need be, for one process at a time; a killed one has it no more.

    Raises `FolderBusy` where `what`, such as "a run", is under way there. What it gives raises
    `FolderMissing` where the folder's name leads to another one by now, or to none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderBusy(f"{what} is under way in {folder}: wait until it has ended") from None
        except OSError as error:  # of some networks: as if nobody else were there
            log.debug("%s cannot be locked: %s", folder, error)
        with kept_from_copies(descriptor):
            yield partial(_check_same, folder, descriptor, what)
    finally:
        os.close(descriptor)


def wait_until_free(folder: Path) -> None:
    """Until nobody has the folder `locked`, or it is not there any more."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        finally:
            os.close(descriptor)


def _check_same(folder: Path, descriptor: int, what: str) -> None:
    """Open files go with a folder that is moved, and what comes later would lie in another one."""
    if leads_to(folder, os.fstat(descriptor)):
        return
    raise FolderMissing(
        f"{folder} was moved, replaced or removed under {what} at work, which ends: put it back, and it "
        "can go on"
    )


def _made(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _no_folder(folder: Path) -> NotADirectoryError:
    return NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
