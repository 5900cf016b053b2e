"""`Client`: a device of a federation in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.api.background import Background
from anabranch.api.live import InProcessServer
from anabranch.api.objects import given_app
from anabranch.api.operated import Operated
from anabranch.api.temporary import TemporaryFolder
from anabranch.client.agent import Agent
from anabranch.client.local import LocalTransport
from anabranch.client.run import ClientOptions, agent_of, run_client
from anabranch.client.shards import placed
from anabranch.client.state import device_id, state_dir_of
from anabranch.client.stopping import Bell
from anabranch.client.summary import AgentSummary
from anabranch.client.telling import OnEvent
from anabranch.client.trust import trusted
from anabranch.client.waiting import WaitingNotice
from anabranch.core.errors import ConfigError
from anabranch.core.limits import COHORT_MIN
from anabranch.core.plain import of_python
from anabranch.core.spelling import spelled
from anabranch.workloads.app import App, Shard


class Client(Background):
    """A device: it asks, trains on its own data and pushes while its context lasts, or until the run ends.

    It is what `anabranch client` runs, in a thread. `app`: an App, its class, or its name. `server`: the
    address `host:port` of one or, with commas between, of several of which one leads; a `Server`, a
    `ServedJob`, or a `Server.local()`. `id` names it, and a number at its end says which part of the data it
    has, unless `shard` (index, count) does. `state_dir` is where its results lie until they are acknowledged:
    by default as for the command, or a temporary folder where the server is in this process.

    torch computes on `device` (`auto`, `cpu`, `cuda`, `mps`), in `precision` (`auto`, `float32`, `bfloat16`,
    `float16`), by `threads` of a CPU (0: its part of the machine's). `width_max` is the widest part of the
    model that it can train, a share of the units, 1 for the whole. It stops after `tasks_max` tasks (0:
    never), and with `step_time_s` emulates a device that needs so many seconds a step. `options` are the
    App's `options`. `token` and `ca_sha256` are what it joins a guarded federation with, at `join` (empty:
    where a server of this process says, else two ports above the server's); `insecure` allows another
    machine's server in the clear. `keepers` names those that it masks its updates for, and `cohort_min` the
    fewest updates in a sum. `on_event(kind, **data)` hears what it does, in the device's threads; without it
    a warning is logged while its server does not answer.

    `summary` is what it has done, None before its end. What ends it without hope comes out of `wait`, or of
    the context's end. Raises `ConfigError` and `AppError`.
    """

    @spelled()
    def __init__(
        self,
        app: Any,
        server: str | Operated | InProcessServer,
        *,
        id: str = "",  # noqa: A002 - as the command's option
        shard: tuple[int, int] | None = None,
        state_dir: str | Path | None = None,
        device: str = "auto",
        precision: str = "auto",
        tasks_max: int = 0,
        step_time_s: float = 0.0,
        width_max: float = 1.0,
        threads: int = 0,
        token: str = "",
        ca_sha256: str = "",
        join: str = "",
        insecure: bool = False,
        keepers: Sequence[str] = (),
        cohort_min: int = COHORT_MIN,
        options: Mapping[str, Any] | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        super().__init__(f"anabranch-client {id}".strip())
        if not isinstance(server, str | InProcessServer | Operated):
            raise ConfigError(f"server is a {type(server).__name__}: give HOST:PORT, or an ab.Server")
        if not (on_event is None or callable(on_event)):
            raise ConfigError(f"on_event is a {type(on_event).__name__}: give a function of (kind, **data)")
        self._app: App = given_app(app)
        self._server, self._on_event, self._bell = server, on_event, Bell()
        self._options = ClientOptions(
            app=self._app.name,
            server=server if isinstance(server, str) else "",
            client_id=id,
            shard=shard,
            state_dir=self._folder(state_dir, id),
            options=options or {},
            device=device,
            precision=precision,
            step_time_s=step_time_s,
            width_max=of_python(width_max),
            tasks_max=tasks_max,
            threads=threads,
            token=token,
            ca_sha256=ca_sha256,
            join=join,
            insecure=insecure,
            trust=trusted(keepers, cohort_min),
        )
        self.summary: AgentSummary | None = None

    def _folder(self, given: str | Path | None, name: str) -> Path:
        if given is not None:
            return Path(given)
        if isinstance(self._server, str):
            return state_dir_of(name)
        self._temporary = TemporaryFolder("anabranch-device-")
        return self._temporary.path

    def _began(self) -> None:
        if not isinstance(self._server, str):
            self._server.has_device(self)

    def _work(self) -> None:
        if isinstance(self._server, InProcessServer):
            self.summary = self._agent(self._server).run()
            return
        options = self._options
        if isinstance(self._server, Operated):
            join = options.join or self._server.join_address
            options = replace(options, server=self._server.address, join=join)
        on_event = self._listener(WaitingNotice(options.server).hear)
        self.summary = run_client(options, on_event, self._app, self._bell)

    def _listener(self, otherwise: OnEvent | None = None) -> OnEvent | None:
        """What hears what the device does."""
        return self._on_event or otherwise

    def _agent(self, server: InProcessServer) -> Agent:
        options, name = self._options, device_id(self._options.state_dir, self._options.client_id)
        self._app.options = options.options
        transport = LocalTransport(server.local, name)

        def shard(config: Mapping[str, Any]) -> Shard:
            return placed(self._app, name, options.shard, config)

        return agent_of(options, self._app, transport, name, shard, self._listener(), self._bell)

    def _end(self) -> None:
        self._bell.stop()
