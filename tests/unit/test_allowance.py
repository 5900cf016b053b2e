"""What a container, a service or `taskset` leaves a process of its machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anabranch.support import allowance
from anabranch.support.allowance import cores, memory_bytes

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
HALF, WHOLE, MIB = "50000 100000\n", "max 100000\n", 1 << 20
NEW, NONE_OLD = "0::{}\n", f"{2**63 - 4096}\n"
OLD = "9:name=systemd:/\n4:memory:{0}\n2:cpu,cpuacct:{0}\n0::/\n"
OF_OLD = "cpu/{0}cpu.cfs_quota_us", "cpu/{0}cpu.cfs_period_us", "memory/{0}memory.limit_in_bytes"


def old(group: str, quota: int, limit: str) -> dict[str, str]:
    return dict(zip((name.format(group) for name in OF_OLD), (f"{quota}\n", "100000\n", limit), strict=True))


@pytest.mark.parametrize(
    ("ours", "files", "found"),
    [
        (NEW.format("/"), {}, (CORES, MEMORY_BYTES)),
        (NEW.format("/"), {"cpu.max": HALF, "memory.max": f"{MIB}\n"}, (1, MIB)),
        (NEW.format("/"), {"cpu.max": WHOLE, "memory.max": "max\n"}, (CORES, MEMORY_BYTES)),
        (NEW.format("/"), {"cpu.max": "999900000 100000\n"}, (CORES, MEMORY_BYTES)),
        # Half a core less than all of them, by another period: what is left of the last one counts as one.
        (NEW.format("/"), {"cpu.max": f"{CORES * 5000 - 2500} 5000\n"}, (CORES, MEMORY_BYTES)),
        # A service: its slice says less than it does itself.
        (NEW.format("/a/b"), {"a/b/memory.max": f"{2 * MIB}\n", "a/memory.max": f"{MIB}\n"}, (CORES, MIB)),
        (NEW.format("/a/b"), {"a/b/cpu.max": WHOLE, "a/cpu.max": HALF}, (1, MEMORY_BYTES)),
        # A container that sees its own group as the root, and the path of the machine.
        (NEW.format("/docker/1"), {"memory.max": f"{MIB}\n"}, (CORES, MIB)),
        (OLD.format("/docker/1"), old("", 50000, f"{MIB}\n"), (1, MIB)),
        (OLD.format("/docker/1"), old("docker/1/", 50000, f"{MIB}\n"), (1, MIB)),
        (OLD.format("/"), old("", -1, NONE_OLD), (CORES, MEMORY_BYTES)),
    ],
)
def test_what_control_groups_leave_is_counted(
    ours: str, files: dict[str, str], found: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours").write_text(ours)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(allowance, "GROUPS", tmp_path)
    monkeypatch.setattr(allowance, "OURS", tmp_path / "ours")
    assert (cores(), memory_bytes()) == found


def test_without_control_groups_it_is_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "OURS", tmp_path / "none")
    assert (cores(), memory_bytes()) == (CORES, MEMORY_BYTES)
