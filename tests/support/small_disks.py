"""Disks that are soon full: real ones, seen by one program alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def own_disk(folder: Path, size: str) -> list[str]:
    """What makes a program see a small disk of its own in a folder; skips where the system forbids it."""
    unshare = shutil.which("unshare")
    words = [str(unshare), "--user", "--map-root-user", "--mount"]
    if unshare is None or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    mount = f'mount -t tmpfs -o size={size} tmpfs {folder} && exec "$@"'
    return [*words, "sh", "-c", mount, "sh"]
