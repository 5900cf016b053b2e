"""The trackers of a live run: told, beside all else, of the measurements that followers report."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from anabranch.reports.trackers import Trackers
from anabranch.reports.tracking.run import TrackedRun
from anabranch.server.glance import Glance
from anabranch.server.run import LiveRun

log = logging.getLogger(__name__)
GRACE_S = 20.0  # at the end, for what trackers have still to be told


async def track(run: LiveRun, trackers: Trackers) -> None:
    """Tell them until the feed ends. In threads: what is others' may take its time."""
    if not trackers:
        return
    folder = Path(run.given.server.data_dir)
    await _beside(partial(trackers.start, TrackedRun.of(run.given, "live", folder)))
    async for happening in run.feed.follow(-1):  # from its beginning: starting them took a while
        if happening.kind == "evaluated":
            moment = run.moments.of(happening.version, happening.at_s)
            await _beside(partial(trackers.metrics, happening.version, happening.data, moment))
    await _beside(partial(trackers.finish, outcome(run.writer.glance)))


async def until_told(tracking: asyncio.Task[None], trackers: Trackers, grace_s: float = GRACE_S) -> None:
    """Wait for what they have still to be told, but not for one that hangs: the run's end is not theirs."""
    done, _ = await asyncio.wait({tracking}, timeout=grace_s)
    if done:
        tracking.result()  # raises what ended it
        return
    tracking.cancel()
    log.warning(
        "tracker %s has not returned within %g s: it is waited for no longer, and what it was not told "
        "`anabranch report DATA --tracker NAME` tells it",
        trackers.at_work,
        grace_s,
    )


async def _beside(tell: Callable[[], None]) -> None:
    """In a thread that nobody waits for at the end of the process, as asyncio does for those of its own."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def work() -> None:
        try:
            tell()
        finally:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=work, name="anabranch-tracker", daemon=True).start()
    await done.wait()


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
