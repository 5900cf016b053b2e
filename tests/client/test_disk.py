"""What of a device outlives its process is in step, whichever write a crash comes before or after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from agents import Crash

from anabranch.client.disk import DeviceDisk
from anabranch.client.kept import Keepsake
from anabranch.client.outbox import UpdateEntry
from anabranch.compress.feedback import Memory

# The names that are given, in this order: each is one write, which is there or not.
WRITES = ["memory", "to be kept", "result", "kept", "memory that counts"]


def opened(folder: Path) -> DeviceDisk:
    """A device's disk at a start."""
    disk = DeviceDisk(folder)
    disk.join("run", "layout")
    return disk


def answered(disk: DeviceDisk, update_id: str) -> None:
    """The server has taken a result."""
    disk.commit(update_id)
    disk.discard(update_id)


def work(disk: DeviceDisk, number: int) -> None:
    """A result, with what its uplink and its App remember of it."""
    entry = UpdateEntry(f"u{number}", f"t{number}", "layout", 0, 1, 1, "raw", b"1234", 1)
    disk.put(entry, Memory(np.full(1, number, np.float32), 0), Keepsake(b"%d" % number))
    answered(disk, entry.update_id)


def remembered(disk: DeviceDisk) -> tuple[list[str], float, bytes]:
    """The results that wait, and of which result memory and keepsake are."""
    memory = disk.memory()
    assert memory is not None
    return disk.waiting(), float(memory.residual[0]), disk.kept().app


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("write", range(len(WRITES)), ids=WRITES)
def test_a_result_has_what_belongs_to_it_wherever_a_crash_strikes(
    write: int, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(opened(tmp_path), 0)
    replace, named = Path.replace, list[str]()

    def naming(self: Path, target: Path) -> Path:
        named.append(target.name)
        if len(named) == write + 1 and not after:
            raise Crash
        found = replace(self, target)
        if len(named) == write + 1:
            raise Crash
        return found

    with monkeypatch.context() as dying:
        dying.setattr(Path, "replace", naming)
        with pytest.raises(Crash):
            work(opened(tmp_path), 1)
    there = (write, after) >= (WRITES.index("result"), True)
    again = opened(tmp_path)
    assert remembered(again) == (["u1"] * there, float(there), b"%d" % there)
    answered(again, "u1")  # as its device sends it again
    assert remembered(opened(tmp_path)) == ([], float(there), b"%d" % there)
