"""Disks that are soon full, or can only be read: real ones, seen by one program alone."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def own_disk(folder: Path, size: str) -> list[str]:
    """What makes a program see a small disk of its own in a folder; skips where the system forbids it."""
    return _mounted(f"mount -t tmpfs -o size={size} tmpfs {folder}")


def read_only(folder: Path) -> list[str]:
    """What makes a program see a folder on a disk that it can only read; skips as `own_disk`."""
    return _mounted(f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}")


def _mounted(mount: str) -> list[str]:
    unshare = shutil.which("unshare")
    words = [str(unshare), "--user", "--map-root-user", "--mount"]
    if unshare is None or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    return [*words, "sh", "-c", f'{mount} && exec "$@"', "sh"]


@contextmanager
def kept_disk(folder: Path, size: str) -> Iterator[tuple[list[str], Path]]:
    """Such a disk that outlives the programs on it: what puts them on it, and where it is for everybody."""
    nsenter = shutil.which("nsenter")
    if nsenter is None:
        pytest.skip("no nsenter here")
    words = [*own_disk(folder, size), "sh", "-c", "echo mounted && exec cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mounted\n"
        enter = [nsenter, "--user", "--mount", "--preserve-credentials", "--target", str(holder.pid)]
        yield enter, Path(f"/proc/{holder.pid}/root") / folder.relative_to("/")
        holder.stdin.close()
