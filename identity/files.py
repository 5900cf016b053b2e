"""Files that nobody else may read, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from anabranch.core.errors import ConfigError, disk_error

FOLDER_MODE, FILE_MODE = 0o700, 0o600


def make_private_folder(folder: Path) -> None:
    """Make a folder for its owner alone, with its parents. Raises `StoreError`."""
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(folder, error) from error


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
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):  # where the folder is no folder
            unfinished.unlink(missing_ok=True)
        raise disk_error(path, error) from error
