"""A server without a network, and agents that work for it in virtual time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from federations import config, first_weights
from virtual import VirtualTime

from anabranch.client.agent import Agent
from anabranch.client.local import LocalServer, LocalTransport
from anabranch.client.transport import Transport
from anabranch.core.errors import Unavailable
from anabranch.core.model.params import digest
from anabranch.core.model.units import UnitGroup
from anabranch.workloads.app import App, Shard
from anabranch.workloads.synthetic import Synthetic

SHARD = Shard("train", 0, 4)


class Federation:
    """A server, a clock, and what the agents' events were."""

    def __init__(self, folder: Path, groups: Iterable[UnitGroup] = (), **tables: Any) -> None:
        self.time = VirtualTime()
        self.folder = folder
        self.server = LocalServer(first_weights(), config(**tables), self.time.now, groups=groups)
        self.events: list[tuple[str, dict[str, Any]]] = []

    def agent(self, transport: Transport | None = None, app: App | None = None, **options: Any) -> Agent:
        """A device `a`, which does three tasks unless the options say otherwise."""
        defaults: dict[str, Any] = {"tasks_max": 3, "seed": 7, "bell": self.time.bell, "on_event": self.hear}
        return Agent(
            app or Synthetic(),
            transport or LocalTransport(self.server, "a"),
            "a",
            SHARD,
            self.folder / "a",
            **(defaults | options),
        )

    def hear(self, kind: str, **data: Any) -> None:
        """Keep an event."""
        self.events.append((kind, data))

    def kinds(self) -> list[str]:
        """What happened, in order."""
        return [kind for kind, _ in self.events]

    def model(self) -> str:
        """The digest of the server's model."""
        return digest(self.server.engine.vector)


class Unplugged(LocalTransport):
    """Reaches the server as long as it is plugged in."""

    is_plugged_in = True

    def _check_manifest(self, sha256: str) -> None:
        if not self.is_plugged_in:
            raise Unavailable("no route to the server")
        super()._check_manifest(sha256)
