"""Environments in which the wheel of this tree is installed, as its users do it."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

LEFT_OUT = (".*", "*.egg-info", "build", "dist", "__pycache__", "runs", "docs")
TORCH = os.environ.get("TORCH", "torch==2.13.0")  # as in the Makefile
INSTALL_S = 1800.0  # at most: PyTorch is large


def copy_tree(root: Path, to: Path) -> Path:
    """What git would hand out, less the documents."""
    shutil.copytree(root, to, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return to


def blank_environment(wheel: Path, folder: Path, lines: Sequence[str]) -> Path:
    """A new environment with the wheel, in which a user types `lines`. Returns the folder.

    The wheel stands where the index of packages would: pip finds it installed, and gets what is missing.
    """
    venv.create(folder, with_pip=True)
    torch, *options = TORCH.split()
    (folder / "constraints.txt").write_text(torch + "\n")
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(folder / "constraints.txt"),
        "PIP_PROGRESS_BAR": "off",
        **({"PIP_EXTRA_INDEX_URL": options[-1]} if options else {}),
    }
    for line in (f"pip install -q --no-deps {wheel}", *lines, "pip check"):
        done = subprocess.run(
            ["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=INSTALL_S
        )
        assert done.returncode == 0, f"$ {line}\n{done.stdout}{done.stderr}"
    return folder
