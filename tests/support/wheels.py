"""Wheels of a tree, built and tried without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path


def run(command: list[str], *, cwd: Path | None = None, pythonpath: Path | None = None) -> str:
    """What `command` prints; the test fails with all of it if it fails."""
    environment = os.environ | ({} if pythonpath is None else {"PYTHONPATH": str(pythonpath)})
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(tree: Path, dist: Path, *options: str) -> Path:
    """Build the wheel of `tree` into `dist` (with no option the sdist too, and the wheel from that)."""
    run([sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(dist), str(tree)])
    (wheel,) = dist.glob("*.whl")
    return wheel


def contents(wheel: Path) -> list[str]:
    """The names of what is in it."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def install(wheel: Path, site: Path) -> None:
    """Lay the wheel alone into `site`; what it depends on comes from the environment of the tests."""
    quiet = ["--quiet", "--no-deps", "--no-index", "--no-compile"]
    run([sys.executable, "-m", "pip", "install", *quiet, "--target", str(site), str(wheel)])


def import_everything(site: Path, packages: list[str]) -> Path:
    """Import `packages` from the wheel in `site`, outside any tree; return the folder they came from."""
    # Alembic alone runs its migrations: importing them needs its context.
    imports = "\n".join(f"import {name}" for name in packages if ".migrations" not in name)
    code = f"{imports}\nprint(anabranch.__file__)"
    return Path(run([sys.executable, "-c", code], cwd=site, pythonpath=site).strip()).parent
