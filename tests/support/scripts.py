"""The examples that are scripts: as people have them, and as devices of a federation."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def changed(plain: str, joined: str) -> list[str]:
    """The lines of a script that are not in the plain one, less blank ones and what says what it is."""
    before, after = ((EXAMPLES / name).read_text(encoding="utf-8").splitlines() for name in (plain, joined))
    lines = difflib.unified_diff(before, after, n=0)
    return [s for s in lines if s.startswith("+") and s[1:].strip() and not s.startswith(("+++", '+"""'))]


def losses(name: str, address: str, cwd: Path) -> list[float]:
    """What a script of the examples says, as a device of the server there."""
    command = [sys.executable, str(EXAMPLES / name), address]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for a busy core are slower than none
    done = subprocess.run(command, cwd=cwd, env=quiet, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    return [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("loss ")]
