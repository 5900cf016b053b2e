"""Code of one's own, loaded from where it is: `path/to/file.py:Class` or `module:Class`.

Only what a command line, a file of settings or a caller of this machine names is loaded. A configuration that
came from another machine never gets here (tests/security/test_foreign_code.py).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from anabranch.core.config.tables import Config
from anabranch.core.errors import AppError, ConfigError
from anabranch.core.parts import PartKind, is_code
from anabranch.core.spelling import did_you_mean
from anabranch.support.own_code import is_own, shown, told
from anabranch.support.own_files import module_name
from anabranch.support.own_imports import hidden_neighbours, neighbours

_FILES: dict[str, Path] = {}  # that were loaded, by the paths that named them
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def let_in(config: Config, kinds: Iterable[PartKind]) -> None:
    """Load the code that a configuration names, for each of the kinds: one's own configuration.

    Raises `AppError` where it cannot be loaded, `ConfigError` where it is no part of its kind.
    """
    for kind in kinds:
        for _, place in kind.named_in(config):
            let_in_one(kind, place)


def let_in_one(kind: PartKind, place: str) -> None:
    """The same for one place; a name that is no place is left alone."""
    if is_code(place) and not kind.has(place) and place not in kind.built_in:
        kind.let_in(place, load(place))


def check_trusted(config: Config, kinds: Iterable[PartKind], what: str) -> None:
    """Raises `ConfigError` where a configuration that was found, in `what`, names code."""
    for kind in kinds:
        for key, place in kind.named_in(config):
            if is_code(place) and not kind.has(place):
                raise distrusted(what, key, place)


def distrusted(what: str, key: str, place: str) -> ConfigError:
    """The error for a configuration that was found, in `what`, and names code at this key."""
    return ConfigError(
        f"{what} has {key} = {place!r}, which is code: "
        "look at it, then say --load-code (in Python load_code=True) to run it"
    )


def source_digests(
    config: Config, kinds: Iterable[PartKind], app: Any, also: Iterable[tuple[PartKind, str]] = ()
) -> dict[str, str]:
    """Of the parts of others that a run names, and of its App: place -> a digest that no layout changes.

    It is of the file that has the part, without its comments; of an installed part the place is
    `module:Class`. Empty where there is no source to read. What that file imports from its own folder has
    digests too, as `words.py of mine.py:App`. `app` None: without it. `also`: parts that settings name within
    a text.
    """
    named = [*((kind, name) for kind in kinds for _, name in kind.named_in(config)), *also]
    found = [(name, kind.find(name)) for kind, name in named if _is_of_others(kind, name)]
    parts = {_place(name, part): part for name, part in found}
    if app is not None:
        parts[config.run.workload] = getattr(app, "adapted", app)
    digests = {place: _source_digest(part) for place, part in parts.items()}
    for place, part in parts.items():
        digests |= {f"{name} of {place}": _file_digest(file) for name, file in _neighbours(part).items()}
    return digests


def is_of(place: str, workload: str) -> bool:
    """Whether a place of `source_digests` is the App's, or of what its file imports."""
    return place == workload or place.endswith(f" of {workload}")


def changed_code(known: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The places whose code is another now, or is not there; of more than was known nothing can be said."""
    return [place for place in sorted(known) if now.get(place) != known[place]]


def _is_of_others(kind: PartKind, name: str) -> bool:
    return name not in kind.built_in and (is_code(name) or name in kind.names())


def _place(name: str, part: Any) -> str:
    code = part if hasattr(part, "__qualname__") else type(part)
    return name if is_code(name) else f"{code.__module__}:{code.__qualname__}"


def _source_digest(part: Any) -> str:
    try:
        return _digest(_definitions(_code_of(part)))
    except (OSError, TypeError, SyntaxError):
        return ""


def _file_digest(file: Path) -> str:
    try:
        return _digest(ast.parse(file.read_bytes()).body)
    except (OSError, SyntaxError, ValueError):
        return ""


def _digest(body: Sequence[ast.stmt]) -> str:
    return hashlib.sha256("\n".join(map(ast.dump, body)).encode()).hexdigest()


def _code_of(part: Any) -> Any:
    is_code_itself = inspect.isclass(part) or inspect.isroutine(part) or inspect.ismodule(part)
    return part if is_code_itself else type(part)


def _neighbours(part: Any) -> dict[str, Path]:
    file = getattr(inspect.getmodule(_code_of(part)), "__file__", None)
    return neighbours(Path(file)) if file and file.endswith(".py") and is_own(file) else {}


def _definitions(target: Any) -> Sequence[ast.stmt]:
    """What the target's file has; of a program that was started itself, and of a notebook, the definitions.

    Raises `OSError` and `TypeError` where there is none.
    """
    module = inspect.getmodule(target)
    if module is not None and getattr(module, "__file__", None):
        body = ast.parse(inspect.getsource(module)).body  # by its loader: it may lie in a zip file
        whole = module.__name__ != "__main__"
        return [node for node in body if whole or isinstance(node, DEFINITIONS)]
    own = [f for f in vars(target).values() if inspect.isfunction(f)] if inspect.isclass(target) else [target]
    return [node for f in own for node in ast.parse(textwrap.dedent(inspect.getsource(f))).body]


def load(place: str) -> Any:
    """What `place` names. Raises `AppError` naming what is missing."""
    where, _, name = place.rpartition(":")
    module = from_file(where) if where.endswith(".py") else from_name(where, place)
    return attribute(module, name, where, place)


def attribute(module: ModuleType, name: str, where: str, place: str) -> Any:
    """An attribute of a module that was loaded. Raises `AppError` naming the nearest one."""
    if hasattr(module, name):
        return getattr(module, name)
    near = did_you_mean(name, vars(module))
    raise AppError(f"{place}: {where} has no attribute {name!r}{near and '; ' + near}")


def from_file(path: str) -> ModuleType:
    """The module of a file, executed anew. Raises `AppError`."""
    named = Path(path).expanduser()
    file = named.resolve()
    if not file.is_file():  # what it did when it was loaded may have changed the working directory
        file = _FILES.get(path, file)
    if not file.is_file():
        here = "" if named.is_absolute() else f" in {Path.cwd()}, where the command was typed"
        raise AppError(f"{path}: there is no such file{here}")
    name = module_name(file)
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise AppError(f"{path}: Python cannot load it")
    _FILES[path] = file
    _allow_imports_from(file.parent)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        for hidden in hidden_neighbours(file):
            error.add_note(
                f"{shown(str(hidden))} has the name of another module, which comes first: rename it"
            )
        raise AppError(told(f"{path}: it cannot be loaded", error)) from error
    return module


def from_name(name: str, place: str, hint: str = "") -> ModuleType:
    """A module of this name, from here or installed; `hint` ends the message where there is none.

    Raises `AppError`.
    """
    _allow_imports_from(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise AppError(told(f"{place}: it cannot be loaded", error)) from error
        raise AppError(f"{place}: there is no module {error.name!r}{hint}") from error
    except (Exception, SystemExit) as error:
        raise AppError(told(f"{place}: it cannot be loaded", error)) from error


def _allow_imports_from(folder: Path) -> None:
    """Let code import its neighbours. Last in the path, so that it hides no installed module."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
