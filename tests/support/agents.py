"""A server without a network, and agents that work for it in virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from virtual import VirtualTime

from anabranch.client.agent import Agent
from anabranch.client.local import LocalServer, LocalTransport
from anabranch.client.messages import PushAnswer
from anabranch.client.outbox import Outbox, UpdateEntry
from anabranch.client.stopping import Bell
from anabranch.client.transport import Transport
from anabranch.core.config.tables import ClientTable
from anabranch.core.errors import Unavailable
from anabranch.core.model.params import digest
from anabranch.core.model.units import UnitGroup
from anabranch.testing.federation import config, first_weights
from anabranch.workloads.app import App, Shard
from anabranch.workloads.synthetic import Synthetic

SHARD = Shard("train", 0, 4)
WAIT_S = 600.0
SOON = ClientTable(retry_base_s=0.001, retry_cap_s=0.01)


class Crash(BaseException):
    """The process ends here."""


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

    @property
    def outbox(self) -> Outbox:
        """The device's results that wait."""
        return Outbox(self.folder / "a" / "outbox")

    def crash(
        self,
        moment: str,
        nth: int = 2,
        transport: Transport | None = None,
        heard: Callable[[], object] = lambda: None,
    ) -> list[str]:
        """The device ends when it tells of something for the nth time; what waits in its outbox then."""

        def hear(kind: str, **data: Any) -> None:
            self.hear(kind, **data)
            heard()
            if kind == moment and self.kinds().count(kind) == nth:
                raise Crash

        with pytest.raises(Crash):
            self.agent(transport, on_event=hear, tasks_max=0).run()
        return self.outbox.pending()

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


class InRealTime(Federation):
    """A federation whose devices have threads, and no virtual time."""

    def __init__(self, folder: Path, **tables: Any) -> None:
        super().__init__(folder, **tables)
        self.server.clock = Bell().now

    def agent(self, transport: Transport | None = None, app: App | None = None, **options: Any) -> Agent:
        """As of any, which tries again soon."""
        return super().agent(transport, app, **({"bell": Bell(), "settings": SOON} | options))


class Gated(LocalTransport):
    """Its pushes wait until the gate is open."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__(server, "a")
        self.gate = threading.Event()
        self.pushing = threading.Event()

    def push(self, entry: UpdateEntry) -> PushAnswer:
        """Once it is open."""
        self.pushing.set()
        assert self.gate.wait(WAIT_S)
        return super().push(entry)
