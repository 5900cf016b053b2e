"""Folders that somebody has named."""

from __future__ import annotations

from pathlib import Path

from anabranch.core.errors import DataError, FolderMissing


def from_root(folder: Path) -> Path:
    """Its name wherever the process goes: code of one's own may change the working directory.

    As it is where that directory's name is no text: not every file of ours can hold it.
    """
    there = folder.absolute()
    try:
        str(there).encode()
    except UnicodeEncodeError:
        return folder
    return there


def check_folder(folder: Path, wanted: str) -> None:
    """Raises `FolderMissing` where there is none, `DataError` where it is a file; `wanted`: what to do."""
    if folder.is_file():
        raise DataError(f"{folder} is a file: {wanted}")
    if not folder.is_dir():
        raise FolderMissing(f"{folder} is not there: {wanted}")
