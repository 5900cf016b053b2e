"""The device agent and the follower, from plain options: what the command line calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.client.agent import Agent
from anabranch.client.follower import Follower, Measurement
from anabranch.client.lease import OnEvent
from anabranch.client.operator import OperatorClient
from anabranch.client.outbox import OutboxBounds
from anabranch.client.state import device_id, fresh_id
from anabranch.client.summary import AgentSummary
from anabranch.client.trainer import shard_of
from anabranch.client.transport import GrpcTransport
from anabranch.core.config import ClientTable
from anabranch.workloads.app import Shard, load_app


@dataclass(frozen=True)
class ClientOptions:
    """One device. `server`: `host:port`, or several with commas between them, of which one leads.

    `client_id` empty: one is made up once and kept in `state_dir`.

    `shard_index` of `shard_count` is its part of the training data, split as the run's configuration
    says. `options` are told to the App. `threads`: for torch on a CPU, 0 for torch's own choice.
    `step_time_s`, `outbox`: see `Agent`.
    """

    app: str
    server: str = "127.0.0.1:7070"
    client_id: str = ""
    shard_index: int = 0
    shard_count: int = 1
    state_dir: Path = Path("anabranch-device")
    data_path: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    precision: str = "auto"
    step_time_s: float = 0.0
    tasks_max: int = 0
    threads: int = 0
    retry_base_s: float = ClientTable.retry_base_s
    retry_cap_s: float = ClientTable.retry_cap_s
    outbox: OutboxBounds = field(default_factory=OutboxBounds)


@dataclass(frozen=True)
class FollowerOptions:
    """One follower. `admin` empty: nothing is reported; `role`: `test` or `validation`.

    `seed` must be the run's, so that the validation part is the one that no device trains on; None
    takes it from the operators' service, or is 0 without one.
    """

    app: str
    server: str = "127.0.0.1:7070"
    admin: str = ""
    role: str = "test"
    once: bool = False
    data_path: str = ""
    device: str = "auto"
    every: int = 1
    seed: int | None = None
    poll_s: float = 0.5
    threads: int = 0


def run_client(options: ClientOptions, on_event: OnEvent | None = None) -> AgentSummary:
    """Run a device until the run ends, `tasks_max` is reached, or SIGTERM or SIGINT. See `Agent.run`."""
    app = load_app(options.app, options.data_path)
    app.options = options.options
    client_id = device_id(options.state_dir, options.client_id)
    settings = ClientTable(
        device=options.device,
        precision=options.precision,
        retry_base_s=options.retry_base_s,
        retry_cap_s=options.retry_cap_s,
    )

    def shard(config: Mapping[str, Any]) -> Shard:
        return shard_of(config, options.shard_index, options.shard_count)

    with GrpcTransport(options.server, client_id) as transport:
        agent = Agent(
            app,
            transport,
            client_id,
            shard,
            options.state_dir,
            settings,
            tasks_max=options.tasks_max,
            step_time_s=options.step_time_s,
            threads=options.threads,
            on_event=on_event,
            outbox=options.outbox,
        )
        transport.on_return(agent.hasten)
        return agent.run()


def follow(options: FollowerOptions) -> Iterator[Measurement]:
    """Measure a run's versions as they come. See `Follower`."""
    app = load_app(options.app, options.data_path)
    with ExitStack() as stack:
        transport = stack.enter_context(GrpcTransport(options.server, f"follower-{fresh_id()[:8]}"))
        sink = stack.enter_context(OperatorClient(options.admin)) if options.admin else None
        seed, config = options.seed, None if sink is None else sink.status().config
        if config is not None:
            app.join(config)
        if seed is None:
            seed = 0 if config is None else int(config["run"]["seed"])
        yield from Follower(
            app,
            transport,
            Shard(options.role, seed=seed),
            ClientTable(device=options.device),
            sink=sink,
            once=options.once,
            every=options.every,
            poll_s=options.poll_s,
            threads=options.threads,
        )
