"""Modules of files, by names that say where they lie: whoever has such a name can import it.

What is pickled names its module. A process that is spawned, such as a worker of a DataLoader's, has loaded
none of the files of the one that began it: it imports this package by its name, which then finds the file.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

__path__: list[str] = []  # or nothing would be looked for in here
_NO_PACKAGE = (
    "a file that is named by its path is in no package: import {name} without the dot, "
    "or name the part by its module, as package.module:Class"
)


def module_name(file: Path) -> str:
    """The one name of the module of a file, whose path is absolute."""
    stem = re.sub(r"\W", "_", file.stem)  # for who reads it
    return f"{__name__}.{stem}_{os.fsencode(file).hex()}"


class _FileFinder(MetaPathFinder):
    """Finds the file that such a name says."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol's
        target: ModuleType | None = None,  # noqa: ARG002 - the protocol's
    ) -> ModuleSpec | None:
        """None for another name. Raises `ImportError` for what would lie beside one of the files."""
        package, _, name = fullname.rpartition(".")
        if package != __name__:
            return None
        with suppress(ValueError):  # nor is every name that ends in digits, such as model_10, one of them
            spec = spec_from_file_location(fullname, os.fsdecode(bytes.fromhex(name.rpartition("_")[2])))
            if spec is not None:
                return spec
        raise ImportError(_NO_PACKAGE.format(name=name), name=fullname)


sys.meta_path.append(_FileFinder())
