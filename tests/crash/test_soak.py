"""A federation in which everything goes wrong, one thing after the other: nothing is lost or doubled.

The long form lasts `SOAK_MINUTES` (60), of the seed `SOAK_SEED`, and writes its figures to `SOAK_LINES` too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path

import pytest
from flaky_proxy import FlakyProxy
from small_disks import kept_disk
from soak import DISK, TROUBLES, Sample, Soak

from anabranch.core.limits import MIB

MINUTES = float(os.environ.get("SOAK_MINUTES", "60"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
DISK_MIB_MAX = 24.0  # twice what the retention lets the log have, of 12 KB updates, and SQLite's own log
GROWN_MIB_MAX = 24.0  # of memory: what holes in the heap come to
LINK_BYTES = 64  # on the disk for each version, for ever: its link in the chain


@contextmanager
def soak(folder: Path, seed: int, devices: int) -> Iterator[Soak]:
    """One that has begun; nothing is left of it at the end."""
    (folder / "disk").mkdir()

    def tell(line: str) -> None:
        sys.stdout.write(line + "\n")
        if path := os.environ.get("SOAK_LINES"):
            with Path(path).open("a") as file:
                file.write(line + "\n")

    with kept_disk(folder / "disk", DISK) as (enter, disk):
        running = Soak(folder, enter, disk, seed, devices, tell)
        try:
            with FlakyProxy(running.address, []) as proxy:
                running.begin(proxy)
                yield running
                running.finish()
        finally:
            running.kill()


@pytest.mark.slow
def test_one_of_each_kind(tmp_path: Path) -> None:
    with soak(tmp_path, seed=0, devices=2) as running:
        for name in dict.fromkeys(TROUBLES):
            running.trouble(name)
    found, report = running.oracle, running.report
    assert report is not None
    assert found.lost > 0
    assert running.told > 0
    found.applied.pop()  # what a server says that has counted one twice
    assert len(found.problems(report)) == 2


@pytest.mark.prove
@pytest.mark.timeout(int(3 * 60 * MINUTES + 1800))
def test_nothing_is_lost_and_nothing_grows(tmp_path: Path, figure: Callable[[str], None]) -> None:
    until = time.monotonic() + 60 * MINUTES
    with soak(tmp_path, SEED, devices=8) as running:
        while time.monotonic() < until:
            running.trouble()
    found, samples = running.oracle, running.samples[:-1]
    figure(
        f"{samples[-1].at_s / 60:.0f} minutes, {sum(running.done.values())} troubles "
        f"({', '.join(f'{name} {times}' for name, times in sorted(running.done.items()))}): "
        f"{found.acknowledged} answers, {found.again} of them to what was known, {found.found} updates whose "
        f"answer was cut off, {dict(found.refused) or 'none'} refused; {len(found.applied)} versions of an "
        f"update each; {found.lost} were lost with data put back, of which devices were told"
    )
    early, late = (part(samples, *share) for share in ((0.25, 0.5), (0.5, 1.0)))
    grown = late.steady_bytes - early.steady_bytes
    figure(
        f"the disk had at most {early.disk_bytes / MIB:.1f} MiB in the second quarter, and "
        f"{late.disk_bytes / MIB:.1f} MiB from then on; the server {early.steady_bytes / MIB:.0f} and "
        f"{late.steady_bytes / MIB:.0f} MiB, after a start {early.started_bytes / MIB:.0f} and "
        f"{late.started_bytes / MIB:.0f} MiB; it served again after at most {late.restart_s:.1f} s"
    )
    assert late.disk_bytes < DISK_MIB_MAX * MIB + LINK_BYTES * len(found.applied)
    assert grown < GROWN_MIB_MAX * MIB


def part(samples: Sequence[Sample], begin: float, end: float) -> Sample:
    """The most of everything in a part of the whole time."""
    whole_s = samples[-1].at_s
    some = [astuple(s) for s in samples if begin * whole_s <= s.at_s <= end * whole_s]
    return Sample(*map(max, zip(*some, strict=True)))
