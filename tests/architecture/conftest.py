"""What the tests of the tree itself share: where it is, and which Python files are written by hand."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the tree."""
    return ROOT


@pytest.fixture(scope="session")
def pyproject() -> dict[str, Any]:
    """pyproject.toml, parsed."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def package_dirs(pyproject: dict[str, Any]) -> dict[str, Path]:
    """Import name to real folder, for the packages that pyproject.toml maps."""
    mapping: dict[str, str] = pyproject["tool"]["setuptools"]["package-dir"]
    return {name: ROOT / folder for name, folder in mapping.items()}


@pytest.fixture(scope="session")
def sources(package_dirs: dict[str, Path]) -> list[Path]:
    """Every Python file of the package, of the tests and of the programs beside them."""
    beside = [ROOT / name for name in ("tests", "benchmarks", "examples", "scripts", "docker")]
    return sorted(path for folder in [*package_dirs.values(), *beside] for path in _written(folder))


def _written(folder: Path) -> Iterator[Path]:
    """Python files under `folder`, less generated code; links are not followed: they lead back here."""
    for path in folder.rglob("*.py"):
        if "_pb2" not in path.name and not any(parent.is_symlink() for parent in path.parents):
            yield path
