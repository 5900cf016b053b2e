"""What `make setup` starts from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import venv
from pathlib import Path

import pytest


def test_no_other_python_stands_for_the_one_that_is_named(tmp_path: Path, root: Path) -> None:
    """Else `make pythons` would say of a Python what it has tried with another."""
    named = {"PYTHON": "python-of-nobody", "VENV": str(tmp_path / "made"), "TORCH": "--no-index none"}
    done = subprocess.run(
        [root / "scripts" / "setup.sh"], env=os.environ | named, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert "setup: no Python 3.11 or newer at PYTHON=python-of-nobody: install one" in done.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("other", [True, False])
def test_an_environment_of_another_python_is_not_taken_for_the_one_that_is_named(
    other: bool, tmp_path: Path, root: Path
) -> None:
    venv.create(tmp_path / "made", with_pip=False)
    (tmp_path / "made" / ".ready").touch()
    named = tmp_path / "python"
    named.write_text("#!/bin/sh\necho 3.99.1\n")
    named.chmod(0o755)
    words = [f"PYTHON={named if other else sys.executable}", f"VENV={tmp_path / 'made'}"]
    done = subprocess.run(["make", "-C", root, "setup", *words], capture_output=True, text=True, timeout=600)
    says = f"has Python {platform.python_version()}, and PYTHON={named} is 3.99.1: name another with VENV="
    assert (done.returncode != 0, says in done.stderr) == (other, other)
