"""What belongs to an App's bundle: its file, and the files of Python that it imports from its own folder.

Imports are followed in the source, nothing is run. What is not imported stays out unless it is named, so that
no key, no data and no other work in the same folder travels by accident.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions
from pathlib import Path

from anabranch.core.errors import ConfigError
from anabranch.support.own_imports import OURS, imports_of, local_files


@dataclass
class Sources:
    """The files of an App below `root`, and the names of modules that it imports from elsewhere."""

    root: Path
    files: set[Path] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)

    def follow(self, file: Path) -> None:
        """Take a file, and all that it imports. Raises `AppError`, `ConfigError`."""
        if file in self.files:
            return
        _check_plain(file, self.root)
        self.files.add(file)
        if file.suffix != ".py":
            return
        for names, needed in imports_of(file):
            found = [path for name in names for path in local_files(self.root, name)]
            for path in found:
                self.follow(path)
            top = names[0].partition(".")[0]
            if not found and needed and top not in sys.stdlib_module_names and top != OURS:
                self.foreign.add(top)

    def include(self, pattern: str) -> None:
        """Take the files of a pattern, `words.txt` or `data/*.csv`. Raises `ConfigError` where none is."""
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise ConfigError(f"--include {pattern!r}: name files below {self.root}, the App's own folder")
        found = sorted(path for path in self.root.glob(pattern) if not path.is_dir())
        if not found:
            raise ConfigError(f"--include {pattern!r}: there is no such file below {self.root}")
        for path in found:
            self.follow(path)

    def contents(self) -> dict[str, bytes]:
        """The bytes of each file, by its path from the root."""
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in self.files}

    def needs(self) -> set[str]:
        """The distributions that bring what is imported. Raises `ConfigError` for what is not installed."""
        known, found = packages_distributions(), set()
        for name in sorted(self.foreign):
            if name not in known:
                raise ConfigError(
                    f"the App imports {name!r}, which is neither beside it nor installed here: install it, "
                    "or import it inside `try` if the App can do without"
                )
            found.add(known[name][0])
        return found


def _check_plain(file: Path, root: Path) -> None:
    """Raises `ConfigError` for a link: it would bring what lies elsewhere."""
    below = [file, *(folder for folder in file.parents if folder.is_relative_to(root) and folder != root)]
    if any(path.is_symlink() for path in below) or not file.is_file():
        raise ConfigError(f"{file} is a link, or no file: a bundle has files alone, copy what it should have")
