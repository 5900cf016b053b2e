"""The parts of a run that both services speak to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from anabranch.core.config import Config, ServerTable
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.params import ParamSpec
from anabranch.server.feed import Feed
from anabranch.server.intake import Intake
from anabranch.server.models import Models
from anabranch.server.presence import Presence
from anabranch.server.restored import Restored
from anabranch.server.store.base import RunInfo
from anabranch.server.tls import ServerIdentity
from anabranch.server.uploads import Uploads
from anabranch.server.writer import Writer


@dataclass
class Sent:
    """Bytes of models that were streamed, and what they would have been whole and raw."""

    bytes: int = 0
    full_bytes: int = 0


@dataclass
class LiveRun:
    """One run being served. Bytes are counted since the process started."""

    info: RunInfo
    config: Config
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
    draining: bool = False
    # Set once the run is over.
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    presence: Presence = field(default_factory=lambda: Presence(ServerTable.lease_s))
    # Where it came from a backup, as its operator has said.
    restored: Restored | None = None
    sent_to_devices: Sent = field(default_factory=Sent)
    sent_to_observers: Sent = field(default_factory=Sent)
