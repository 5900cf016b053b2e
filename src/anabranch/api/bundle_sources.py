"""What belongs to an App's bundle: its file, and the files of Python that it imports from its own folder.

Imports are followed in the source, nothing is run. What is not imported stays out unless it is named, so that
no key, no data and no other work in the same folder travels by accident.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions
from pathlib import Path

from anabranch.core.errors import AppError, ConfigError

OURS = "anabranch"


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
        for names, needed in _imports(file):
            found = [path for name in names for path in _local(self.root, name)]
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


def module_of(file: Path) -> tuple[Path, str]:
    """The folder from which a file is imported, above the packages that it lies in, and its name there."""
    root, parts = file.parent, [file.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    return root, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _check_plain(file: Path, root: Path) -> None:
    """Raises `ConfigError` for a link: it would bring what lies elsewhere."""
    below = [file, *(folder for folder in file.parents if folder.is_relative_to(root) and folder != root)]
    if any(path.is_symlink() for path in below) or not file.is_file():
        raise ConfigError(f"{file} is a link, or no file: a bundle has files alone, copy what it should have")


def _local(root: Path, name: str) -> Iterator[Path]:
    """The files below `root` that importing a module of this name runs; none where it is of elsewhere."""
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names or parts[0] == OURS:
        return
    for count in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:count])
        yield from (file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file())


def _imports(file: Path) -> Iterator[tuple[list[str], bool]]:
    """Of each import of a file the names that may be modules, and whether the App cannot do without it."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise AppError(f"{file}: it cannot be read: {error}") from error
    _, own = module_of(file)
    package = own if file.name == "__init__.py" else own.rpartition(".")[0]
    optional = set(_optional(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield [alias.name], node not in optional
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            start = ".".join(part for part in [*above, node.module or ""] if part)
            yield [start, *(f"{start}.{alias.name}" for alias in node.names)], node not in optional


def _optional(tree: ast.AST) -> Iterator[ast.AST]:
    """What is imported inside `try`, or for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            yield from _below(node.body)


def _below(body: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    for statement in body:
        yield from ast.walk(statement)
