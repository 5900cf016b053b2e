"""What this process may use of its machine: a container, a service or `taskset` may leave it less."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OURS = Path("/proc/self/cgroup")
UNBOUNDED = ("max", "-1")


def cores() -> int:
    """How many threads of it can run at a time; of half a core's time one."""
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    said = _said("cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])
    return min([ours, *(math.ceil(int(time) / int(of)) for time, of in said if time not in UNBOUNDED)])


def memory_bytes() -> int:
    """How much memory it can have, together with what shares its container."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = _said("memory", ["memory.max"], ["memory.limit_in_bytes"])
    return min([whole, *(int(limit) for (limit,) in said if limit not in UNBOUNDED)])


def _said(controller: str, files: Sequence[str], old_files: Sequence[str]) -> Iterator[list[str]]:
    """What the control groups of this process say, Linux's or its older ones: its own, and all that it is in.

    A container often sees its own group as the root, under a path that it does not see: then that one counts.
    """
    with suppress(OSError):
        for line in OURS.read_text().splitlines():
            _, old, path = line.split(":", 2)
            if old and controller not in old.split(","):
                continue
            root = GROUPS / controller if old else GROUPS
            own = root / path.lstrip("/")
            for group in [own, *own.parents][: len(own.parts) - len(root.parts) + 1]:
                names = old_files if old else files
                with suppress(OSError):
                    yield " ".join((group / name).read_text() for name in names).split()
