"""What `make setup` starts from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def test_no_other_python_stands_for_the_one_that_is_named(tmp_path: Path, root: Path) -> None:
    """Else `make pythons` would say of a Python what it has tried with another."""
    named = {"PYTHON": "python-of-nobody", "VENV": str(tmp_path / "made"), "TORCH": "--no-index none"}
    done = subprocess.run(
        [root / "scripts" / "setup.sh"], env=os.environ | named, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert "setup: no Python 3.11 or newer at PYTHON=python-of-nobody: install one" in done.stderr
    assert not (tmp_path / "made").exists()
