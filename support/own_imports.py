"""What a file of one's own imports from its own folder, as its source says: nothing is run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from anabranch.core.errors import AppError

OURS = "anabranch"


def neighbours(file: Path) -> dict[str, Path]:
    """The other files that importing a file runs, from its own folder, by their paths from there.

    Of one that cannot be read nothing more is found.
    """
    root, _ = module_of(file)
    found: dict[str, Path] = {}
    waiting = [file]
    while waiting:
        for path in _imported(waiting.pop(), (root, file.parent)):
            name = path.relative_to(root).as_posix()
            if path != file and name not in found:
                found[name] = path
                waiting.append(path)
    return found


def _imported(file: Path, folders: Iterable[Path]) -> Iterator[Path]:
    with suppress(AppError):
        for names, _ in imports_of(file):
            yield from (path for name in names for folder in folders for path in local_files(folder, name))


def hidden_neighbours(file: Path) -> list[Path]:
    """The files beside one that has been run by whose names it has imported others, which come first."""
    found = []
    with suppress(AppError):
        for name in {names[0].partition(".")[0] for names, _ in imports_of(file)} & sys.modules.keys():
            places = (file.parent / f"{name}.py", file.parent / name / "__init__.py")
            beside = [place for place in places if place.is_file() and place != file]
            found += [place for place in beside if getattr(sys.modules[name], "__file__", "") != str(place)]
    return sorted(found)


def module_of(file: Path) -> tuple[Path, str]:
    """The folder from which a file is imported, above the packages that it lies in, and its name there."""
    root, parts = file.parent, [file.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    return root, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def local_files(root: Path, name: str) -> Iterator[Path]:
    """The files below `root` that importing a module of this name runs; none where it is of elsewhere."""
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names or parts[0] == OURS:
        return
    for count in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:count])
        yield from (file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file())


def imports_of(file: Path) -> Iterator[tuple[list[str], bool]]:
    """Of each import of a file the names that may be modules, and whether the file cannot do without it.

    Raises `AppError` where the file cannot be read.
    """
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError) as error:
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
