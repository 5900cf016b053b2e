"""The benchmarks for tests, without the root on the path, where `server` and `client` are others."""

from __future__ import annotations

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """A module of the package `benchmarks`, which finds its neighbours."""
    if "benchmarks" not in sys.modules:
        spec = spec_from_file_location(
            "benchmarks", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
        )
        assert spec is not None
        sys.modules["benchmarks"] = module_from_spec(spec)
    return importlib.import_module(f"benchmarks.{name}")
