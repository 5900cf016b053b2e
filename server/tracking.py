"""The trackers of a live run: told, beside all else, of the measurements that followers report."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from anabranch.reports.trackers import Trackers
from anabranch.reports.tracking.run import TrackedRun
from anabranch.server.glance import Glance
from anabranch.server.run import LiveRun


async def track(run: LiveRun, trackers: Trackers) -> None:
    """Tell them until the feed ends. In threads: what is others' may take its time."""
    if not trackers:
        return
    folder = Path(run.given.server.data_dir)
    await asyncio.to_thread(trackers.start, TrackedRun.of(run.given, "live", folder))
    async for happening in run.feed.follow(-1):  # from its beginning: starting them took a while
        if happening.kind == "evaluated":
            moment = run.moments.of(happening.version, happening.at_s)
            await asyncio.to_thread(trackers.metrics, happening.version, happening.data, moment)
    await asyncio.to_thread(trackers.finish, outcome(run.writer.glance))


def outcome(glance: Glance) -> dict[str, Any]:
    """What a server knows of its run's end; `anabranch report` makes the whole result."""
    counts = glance.counters
    return {
        "kind": "live",
        "status": "finished" if glance.finished else "interrupted",
        "why": glance.finished or "the server was stopped",
        "versions": glance.version,
        "updates_applied": counts.applied,
        "updates_rejected": counts.rejected,
    }
