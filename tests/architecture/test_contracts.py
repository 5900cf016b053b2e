"""The linters, the type checker and the import contracts hold, and the contracts have teeth."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BIN = Path(sys.executable).parent
OF_THE_OLDEST = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="types are checked with 3.11: later Pythons have another numpy"
)

# One forbidden import of each kind: the module that makes it, the line, and what is said of it.
VIOLATIONS = {
    "a layer above": ("core/above", "import anabranch.strategies", "core.above -> anabranch.strategies"),
    "a sibling": ("server/sibling", "import anabranch.client", "server.sibling -> anabranch.client"),
    "a driver beside the cockpit": (
        "cockpit/sibling",
        "import anabranch.client",
        "cockpit.sibling -> anabranch.client",
    ),
    "a framework": ("strategies/framework", "import torch", "strategies.framework -> torch"),
    "threads in the core": ("core/threads", "import threading", "core.threads -> threading"),
    "a clock": ("compress/clock", "import time", "compress.clock -> time"),
    "a driver under the host": ("host/under", "import anabranch.server", "host.under -> anabranch.server"),
    "a clock in the host": ("host/clock", "import time", "host.clock -> time"),
    "torch in the server": ("server/framework", "import torch", "server.framework -> torch"),
    "the store": (
        "src/anabranch/cli/store",
        "import anabranch.server.store",
        "cli.store -> anabranch.server.store",
    ),
    "a module in no layer": (
        "src/anabranch/alone",
        "import anabranch.core",
        "not listed as layers:\n\n- anabranch.alone\n",
    ),
}


def _run(tool: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / tool, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1100,
    )


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "--output-format=concise", "."),
        ("ruff", "format", "--check", "."),
        pytest.param(("mypy",), marks=[OF_THE_OLDEST, pytest.mark.slow]),
        ("lint-imports", "--no-logo"),
    ],
    ids=["style", "format", "types", "imports"],
)
def test_the_tree_passes(command: tuple[str, ...], root: Path) -> None:
    done = _run(*command, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_contracts_are_those_of_the_contributors_page(root: Path, pyproject: dict[str, Any]) -> None:
    """Else a name that is left out of a list is missed by nobody."""
    page = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.search(r"^((?:`\w+`(?:, | and ))+`\w+`) import no ([\w, \n]+)\.", page, re.MULTILINE)
    assert found is not None
    (pure,) = (c for c in pyproject["tool"]["importlinter"]["contracts"] if c["id"] == "pure")
    assert {f"anabranch.{name}" for name in re.findall(r"\w+", found[1])} - {"anabranch.and"} == {
        *pure["source_modules"]
    }
    assert {*re.findall(r"\w+", found[2])} - {"or"} == {*pure["forbidden_modules"]}


@pytest.fixture
def copy(root: Path, package_dirs: dict[str, Path], tmp_path: Path) -> Path:
    """The package alone, links and all, where a test may break it."""
    for folder in package_dirs.values():
        shutil.copytree(
            folder,
            tmp_path / folder.relative_to(root),
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(root / "pyproject.toml", tmp_path)
    return tmp_path


def _contracts_of(copy: Path) -> subprocess.CompletedProcess[str]:
    return _run(
        "lint-imports", "--no-logo", "--no-cache", cwd=copy, PYTHONPATH=str(copy / "src"), COLUMNS="200"
    )


def test_a_forbidden_import_is_seen_through_the_links(copy: Path) -> None:
    clean = _contracts_of(copy)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    for module, line, _ in VIOLATIONS.values():
        intruder = copy / f"{module}.py"
        assert not intruder.exists()
        intruder.write_text(line + "\n")
    broken = _contracts_of(copy)
    assert broken.returncode == 1, broken.stdout + broken.stderr
    assert [name for name, (_, _, said) in VIOLATIONS.items() if said not in broken.stdout] == []
