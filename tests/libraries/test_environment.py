"""What the extra `libraries` gathers is there, and fits together."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from anabranch.core.config.extras import EXTRAS

pytestmark = pytest.mark.libraries

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
GATHERED = next(
    need.removeprefix("anabranch[").removesuffix("]").split(",")
    for need in PYPROJECT["project"]["optional-dependencies"]["libraries"]
    if need.startswith("anabranch[")
)


def test_the_versions_of_all_of_them_go_together() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("module", [module for module, extra in EXTRAS.items() if extra in GATHERED])
def test_what_an_extra_brings_is_imported(module: str) -> None:
    assert import_module(module)
