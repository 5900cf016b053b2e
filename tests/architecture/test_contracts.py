"""The linters, the type checker and the import contracts hold, and the contracts have teeth."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent

# One forbidden import of each kind: the file that makes it, and the line.
VIOLATIONS = {
    "a layer above": ("core/intruder.py", "import anabranch.strategies"),
    "a sibling": ("server/intruder.py", "import anabranch.client"),
    "a framework": ("strategies/intruder.py", "import torch"),
    "a clock": ("compress/intruder.py", "import time"),
    "a driver under the host": ("host/intruder.py", "import anabranch.server"),
    "a clock in the host": ("host/intruder.py", "import time"),
    "torch in the server": ("server/intruder.py", "import torch"),
    "the store": ("src/anabranch/cli/intruder.py", "import anabranch.server.store"),
    "a module in no layer": ("src/anabranch/intruder.py", "import anabranch.core"),
}


def _run(tool: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / tool, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=170,
    )


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "--output-format=concise", "."),
        ("ruff", "format", "--check", "."),
        ("mypy",),
        ("lint-imports", "--no-logo"),
    ],
    ids=["style", "format", "types", "imports"],
)
def test_the_tree_passes(command: tuple[str, ...], root: Path) -> None:
    done = _run(*command, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr


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


def test_a_forbidden_import_is_seen_through_the_links(copy: Path) -> None:
    unseen = []
    for name, (file, line) in VIOLATIONS.items():
        intruder = copy / file
        intruder.write_text(line + "\n")
        done = _run("lint-imports", "--no-logo", "--no-cache", cwd=copy, PYTHONPATH=str(copy / "src"))
        intruder.unlink()
        if done.returncode == 0 or "BROKEN" not in done.stdout:
            unseen.append(name)
    assert unseen == []
    clean = _run("lint-imports", "--no-logo", "--no-cache", cwd=copy, PYTHONPATH=str(copy / "src"))
    assert clean.returncode == 0, clean.stdout + clean.stderr
