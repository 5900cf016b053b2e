"""A server that has taken a hundred thousand small updates is as it was when it was young.

`server.keep` bounds its log. What may grow is what is kept of each update: a link of the chain for ever, and
the receipts of the newest 100,000. `AGEING_UPDATES` says how many updates there are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fire import RECEIPT_BYTES, Healthy, Target, target
from server_process import ConfiguredServer
from wire import SUM

from anabranch.core.limits import MIB

UPDATES = int(os.environ.get("AGEING_UPDATES", "100000"))
PARTS = 10
DEVICES = 8
TABLES = {"strategy": SUM, "server": {"keep": "versions:500", "lease_min_s": 60.0}}
DISK_BYTES = 600  # of each update: its receipt and its link
SLACK_MIB = 24.0  # holes in the heap; SQLite's own log


@dataclass(frozen=True)
class Age:
    """A server after so many updates; the time is of a start after a kill, and what it had in memory then."""

    updates: int
    rss_bytes: int
    disk_bytes: int
    restart_s: float
    restarted_bytes: int

    def __str__(self) -> str:
        sizes = (self.rss_bytes, self.disk_bytes, self.restarted_bytes)
        memory, disk, restarted = (f"{size / MIB:.0f} MiB" for size in sizes)
        start = f", served again after {self.restart_s:.1f} s with {restarted}" if self.restart_s else ""
        return f"{self.updates} updates: {memory} of memory, {disk} of disk{start}"


def older(server: Target, updates: int, before: int, kill: bool) -> Age:
    """The server after so many more."""
    with Healthy(server, DEVICES) as healthy:
        while healthy.applied < updates:
            assert not healthy.problems, healthy.problems
            time.sleep(0.05)
    rss, disk = server.rss_bytes, server.disk_bytes
    restart_s = server.restart() if kill else 0.0
    return Age(before + healthy.applied, rss, disk, restart_s, server.rss_bytes)


@pytest.mark.prove
@pytest.mark.timeout(4 * 3600)
def test_a_hundred_thousand_updates_make_no_server_slow(
    tmp_path: Path, figure: Callable[[str], None]
) -> None:
    ages: list[Age] = []
    with target(tmp_path, 300, server=lambda folder: ConfiguredServer(folder, TABLES)) as server:
        for part in range(PARTS):
            before = ages[-1].updates if ages else 0
            ages.append(older(server, UPDATES // PARTS, before, kill=part in (0, PARTS - 1)))
            figure(str(ages[-1]))
        server.close(ages[-1].updates)
    first, second, last = ages[0], ages[1], ages[-1]  # the second life begins with the second
    slack = SLACK_MIB * MIB
    assert last.rss_bytes - second.rss_bytes < RECEIPT_BYTES * (last.updates - second.updates) + slack
    assert last.disk_bytes - first.disk_bytes < DISK_BYTES * (last.updates - first.updates) + slack
