"""Files that nobody else may read, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from pathlib import Path

from anabranch.core.errors import ConfigError, disk_error, on_disk

log = logging.getLogger(__name__)

FOLDER_MODE, FILE_MODE, OTHERS = 0o700, 0o600, 0o077
DENIED = (errno.EACCES, errno.EPERM)


def whose(path: Path, error: OSError) -> str:
    """What to add where something is denied: who this process is, and whose the file or its folder is."""
    if error.errno in DENIED:
        for found in (path, *path.parents):
            with contextlib.suppress(OSError):
                status = found.stat()
                its = f"{found} of uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):03o}"
                return f" (this process is of uid {os.geteuid()}, {its})"
    return ""


def check_owner(*paths: Path) -> None:
    """Raises `ConfigError` for another user's, who could not open what this process makes there.

    What is missing is root's to make only where root has the folder that it is to lie in. Anybody else makes
    it where he is let: a volume may be root's, and the server's by its group. Raises `StoreError` as well.
    """
    for path in paths:
        with on_disk(path):
            found = next(there for there in (path, *path.absolute().parents) if there.exists())
            owner, is_file = found.stat().st_uid, found.is_file()
        if owner != (ours := os.geteuid()) and (is_file or ours == 0):
            raise ConfigError(
                f"{found} belongs to uid {owner}, whose server could not open what uid {ours} "
                f"makes: do it as that user (sudo -u '#{owner}')"
            )


def make_private_folder(folder: Path) -> None:
    """Make a folder for its owner alone, with its parents, or make it so. Raises `StoreError`."""
    try:
        for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            missing.mkdir(mode=FOLDER_MODE, exist_ok=True)
        tighten(folder)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise disk_error(folder, error, whose(folder, error)) from error


def tighten(*paths: Path) -> None:
    """Take everybody else's rights from files and folders that are there; say so where that is not ours."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if not path.is_symlink() and (mode := stat.S_IMODE(path.stat().st_mode)) & OTHERS:
                try:
                    path.chmod(mode & ~OTHERS)
                except PermissionError:
                    log.warning("%s is open to others, and of another owner: chmod go= %s", path, path)


def tighten_tree(folder: Path) -> None:
    """The same for a folder with all that is in it, unless the folder keeps everybody out by itself."""
    if stat.S_IMODE(folder.stat().st_mode) & OTHERS:
        tighten(folder, *folder.rglob("*"))


def private(path: str, flags: int) -> int:
    """For the `opener` of `open`: a file for its owner alone."""
    return os.open(path, flags, FILE_MODE)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. It may be a link: data may lie on another disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_private(path: Path, data: bytes, replace: bool = True) -> None:
    """Write a file for its owner alone, durably. Raises `StoreError`, and `ConfigError` unless `replace`."""
    if not replace and path.exists():
        raise ConfigError(f"{path} is there already: it is not overwritten")
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.unlink(missing_ok=True)
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # where the folder is no folder
            unfinished.unlink(missing_ok=True)
        raise disk_error(path, error, whose(path, error)) from error
