"""A job: one of the runs of a server that serves several, and how it stands."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from anabranch.server.bundles import OfferedBundle
from anabranch.server.gate import Scope
from anabranch.server.job_folder import JobNote
from anabranch.server.metrics import Metrics
from anabranch.server.run import LiveRun


class JobState(StrEnum):
    """How a job stands."""

    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass
class HostedJob:
    """One of them, for as long as its folder is there."""

    path: Path
    note: JobNote = field(default_factory=lambda: JobNote(0.0))
    state: JobState = JobState.STOPPED
    why: str = ""
    unread: str = ""  # what is wrong with its note, which is as it was read last
    told: bool = False  # how it stands
    app: str = ""
    bundle: OfferedBundle | None = None  # of its App, if devices are to have it
    run: LiveRun | None = None  # while it is served
    metrics: Metrics | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    failures: int = 0
    not_before: float = 0.0
    calls: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # there are none

    @property
    def name(self) -> str:
        """Its folder's."""
        return self.path.name

    @classmethod
    def only(cls, run: LiveRun) -> HostedJob:
        """The run of a server that serves one: a job without a name."""
        over = run.ended.is_set()
        state, why = (JobState.ENDED, run.writer.glance.finished) if over else (JobState.RUNNING, "")
        return cls(Path(), state=state, why=why, app=run.config.run.workload, bundle=run.bundle, run=run)

    @property
    def scope(self) -> Scope:
        """Whose it is."""
        return Scope(self.note.devices)
