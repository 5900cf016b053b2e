"""The modules of a bundle, imported below a root of their own: two bundles may have modules of one name.

A bundle's code says `import helpers` as it did where it was written. Here that module is
`anabranch.support.bundled_code.2f746d70.helpers`, for this bundle's code alone: `__import__` among the
built-ins that its modules see looks among the bundle's own modules first. So neither another bundle nor what
is installed here can take the place of one, and none is left in the way of anybody else's imports.

The root's name says which folder it is of, so a process that is spawned, such as a worker of a DataLoader's,
finds the code of what it is given (see `own_files`).
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from anabranch.core.errors import AppError
from anabranch.support.own_code import told

__path__: list[str] = []  # or nothing would be looked for in here


def from_bundle(folder: Path, module: str) -> ModuleType:
    """A module of the bundle whose files lie in `folder`. Raises `AppError` where it cannot be loaded."""
    root = f"{__name__}.{os.fsencode(folder.resolve()).hex()}."
    try:
        return importlib.import_module(root + module)
    except (Exception, SystemExit) as error:
        name = (isinstance(error, ModuleNotFoundError) and error.name) or ""
        lack = f"it has no module {name.removeprefix(root)!r}" if name.startswith(root) else ""
        start = f"{module} of the bundle in {folder}: it cannot be loaded"
        raise AppError(told(start, error, lack)) from error


class _BundledModules(MetaPathFinder):
    """Finds the root of a folder, and what is below it: files of Python source, and folders."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        if not fullname.startswith(f"{__name__}.") or path is None:
            return None
        root, _, below = fullname.removeprefix(f"{__name__}.").partition(".")
        if not below:
            return _folder(fullname, os.fsdecode(bytes.fromhex(root)))
        for folder in path:
            place = Path(folder, fullname.rpartition(".")[2])
            for file in (place / "__init__.py", place.with_suffix(".py")):
                if file.is_file():
                    loader = _BundledSource(f"{__name__}.{root}", file)
                    return spec_from_file_location(fullname, file, loader=loader)
            if place.is_dir():
                return _folder(fullname, str(place))
        return None


def _folder(name: str, place: str) -> ModuleSpec:
    found = ModuleSpec(name, None, is_package=True)
    found.submodule_search_locations = [place]
    return found


class _BundledSource(SourceLoader):
    """Loads one file. Nothing is written beside it: what is unpacked stays what was signed."""

    def __init__(self, root: str, file: Path) -> None:
        self._root, self._file = root, file

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002 - the contract's
        """See `SourceLoader`."""
        return str(self._file)

    def get_data(self, path: str) -> bytes:
        """See `SourceLoader`."""
        return Path(path).read_bytes()

    def exec_module(self, module: ModuleType) -> None:
        """See `SourceLoader`."""
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": self._import}
        super().exec_module(module)

    def _import(
        self,
        name: str,
        globals_: Mapping[str, Any] | None = None,
        locals_: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        """As `builtins.__import__`, but for the names that are the bundle's own."""
        top = name.partition(".")[0]
        if level or not self._has(top):
            return builtins.__import__(name, globals_, locals_, fromlist, level)
        if fromlist:
            return builtins.__import__(f"{self._root}.{name}", globals_, locals_, fromlist, 0)
        importlib.import_module(f"{self._root}.{name}")
        return sys.modules[f"{self._root}.{top}"]

    def _has(self, top: str) -> bool:
        if top in sys.stdlib_module_names or top == "anabranch":
            return False
        folder = Path(sys.modules[self._root].__path__[0])
        return (folder / f"{top}.py").is_file() or (folder / top).is_dir()


sys.meta_path.insert(0, _BundledModules())
