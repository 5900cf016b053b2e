"""What `import anabranch` gives, and what it must not bring along."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import anabranch


def test_the_version_is_that_of_the_package(pyproject: dict[str, Any]) -> None:
    assert anabranch.__version__ == pyproject["project"]["version"]


def test_the_public_names_are_sorted_and_there() -> None:
    assert anabranch.__all__ == sorted(anabranch.__all__)
    assert [name for name in anabranch.__all__ if not hasattr(anabranch, name)] == []


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("anabranch", ["torch", "sqlalchemy", "flwr", "sklearn"]),
        ("anabranch.client", ["torch", "sqlalchemy", "flwr"]),
        ("anabranch.cli.main", ["torch", "sqlalchemy", "flwr", "sklearn"]),
        ("anabranch.simulation", ["torch", "sqlalchemy", "flwr"]),
        ("anabranch.server.app", ["torch", "flwr", "alembic", "anabranch.strategies.fadas"]),
        ("anabranch.strategies", ["numpy"]),
    ],
)
def test_an_import_stays_light(module: str, unwanted: Sequence[str], tmp_path: Path) -> None:
    code = f"import json, sys, {module}; print(json.dumps([n for n in {unwanted!r} if n in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
