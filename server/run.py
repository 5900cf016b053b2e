"""The parts of a run that both services speak to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.core.config.tables import Config, ServerTable
from anabranch.core.effects import (
    Decided,
    Effect,
    Finished,
    Granted,
    LeaseEnded,
    Published,
    Reopened,
    SettingsSet,
)
from anabranch.core.engine.settable import with_values
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.params import ParamSpec
from anabranch.host.first import FirstModel
from anabranch.server.bundles import OfferedBundle
from anabranch.server.calls import Calls
from anabranch.server.feed import Feed
from anabranch.server.intake import Intake
from anabranch.server.models import Models
from anabranch.server.moments import Moments
from anabranch.server.outage import Outage
from anabranch.server.presence import Presence
from anabranch.server.restored import Restored
from anabranch.server.store.base import RunInfo
from anabranch.server.store.files import disk_bytes
from anabranch.server.store.quota import Quota
from anabranch.server.streams import Streams
from anabranch.server.tls import ServerIdentity
from anabranch.server.unmasking import Unmasking
from anabranch.server.uploads import Uploads
from anabranch.server.writer import Writer
from anabranch.support.tracing import is_tracing, span_of_task


@dataclass
class SentBytes:
    """Bytes of models that were streamed, and what they would have been whole and raw."""

    bytes: int = 0
    full_bytes: int = 0


@dataclass
class LiveRun:
    """One run being served. Bytes are counted since the process started."""

    info: RunInfo
    # What the process was given, with the settings that may change as the run was started with.
    given: Config
    spec: ParamSpec
    writer: Writer
    models: Models
    uploads: Uploads
    intake: Intake
    feed: Feed
    started_at: float
    # Where every caller must be known; None on loopback or with --insecure.
    identity: ServerIdentity | None
    limits: Limits = field(default=DEFAULT_LIMITS)
    calls: Calls = field(default_factory=Calls)
    draining: bool = False
    # One of them is set: whether the run is over.
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    going_on: asyncio.Event = field(default_factory=asyncio.Event)
    presence: Presence = field(default_factory=lambda: Presence(ServerTable.lease_s))
    # Where it came from a backup, as its operator has said.
    restored: Restored | None = None
    # What devices may build version 0 from; None where they fetch it.
    first: FirstModel | None = None
    # Of its App, if devices are to have it from here.
    bundle: OfferedBundle | None = None
    # Who asks the keepers, where updates are masked.
    unmasking: Unmasking | None = None
    # Whether tasks may be of some whole tensors, which not every device's program knows.
    in_parts: bool = False
    sent_to_devices: SentBytes = field(default_factory=SentBytes)
    sent_to_observers: SentBytes = field(default_factory=SentBytes)
    sending: int = 0  # models on their way
    # Held by who sets something, until it is: so it is checked against what it finds in force.
    setting: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        table = self.given.server
        self.quota = Quota(Path(table.data_dir), table.disk_bytes_max)  # for figures: the store has its own
        self.writer.room.free_bytes = lambda: self.disk_bytes()[0]
        self.moments = Moments(self.info.created_at, self._counts)
        self.streams = Streams(self.limits.rpcs_max // 2)  # the rest is for calls
        self.outage = Outage(self.writer.give_up)

    def disk_bytes(self) -> tuple[int, int]:
        """What may still be written where the data lie, and what in all: by the disk, and by settings."""
        free, size = disk_bytes(Path(self.given.server.data_dir))
        return self.quota.of_disk(max(0, free - self.limits.free_disk_bytes_min), size)

    def _counts(self) -> tuple[int, int, int]:
        return self.writer.glance.counters.applied, self.uploads.bytes_total, self.sent_to_devices.bytes

    @property
    def config(self) -> Config:
        """The settings in force."""
        return with_values(self.given, self.writer.glance.changes.values)

    def hear(self, effects: Sequence[Effect]) -> None:
        """Take note of what an event has come to."""
        if self.unmasking is not None:
            self.unmasking.hear(effects)
        for effect in effects:
            if isinstance(effect, Published) and is_tracing():
                self._trace(effect)
            if isinstance(effect, Granted):
                self.presence.given(effect.task)
            elif isinstance(effect, Decided):
                self.presence.done(effect.client_id, effect.receipt.task_id)
            elif isinstance(effect, LeaseEnded):
                self.presence.done(effect.task.client_id, effect.task.task_id)
            elif isinstance(effect, Finished | Reopened):
                self.set_over(isinstance(effect, Finished))
            elif isinstance(effect, SettingsSet):
                self.presence.silence_s = self.writer.glance.settings.lease_s

    def _trace(self, published: Published) -> None:
        """The version is the end of each update that is in it, however long ago that came."""
        receipts = self.writer.glance.receipts
        for update_id in published.update_ids:
            if (receipt := receipts.get(update_id)) is not None:
                span_of_task("publish", receipt.task_id, version=published.version)

    def drain(self) -> None:
        """Hand out no more tasks, and let streams end."""
        self.draining = True
        self.feed.close()
        self.streams.close()

    def set_over(self, over: bool) -> None:
        """The run has ended, or goes on."""
        now, before = (self.ended, self.going_on) if over else (self.going_on, self.ended)
        now.set()
        before.clear()
