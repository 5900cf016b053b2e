"""The device agent and the follower, from plain options: what the command line calls."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from anabranch.client.agent import Agent
from anabranch.client.channel import check_plain
from anabranch.client.follower import Follower, Measurement
from anabranch.client.guarded import check_not_guarded
from anabranch.client.history import HistoryRestored
from anabranch.client.joining import join_addresses, joined_wallet
from anabranch.client.kept import Keepsake, keepsake_in
from anabranch.client.neighbours import Neighbours
from anabranch.client.operator import OperatorClient, RunStatus, open_operator, operator_wallet
from anabranch.client.outbox import OutboxBounds
from anabranch.client.shards import is_shard, placed
from anabranch.client.state import device_id, forget_run, fresh_id, fresh_seed, locked, settled_id
from anabranch.client.stopping import Bell, Interrupted, interruptible, persist
from anabranch.client.summary import AgentSummary
from anabranch.client.telling import OnEvent
from anabranch.client.transport import GrpcTransport, Transport
from anabranch.client.transports import is_foreign, open_transport
from anabranch.client.trust import KeeperTrust
from anabranch.client.waiting import WaitingNotice
from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import ClientTable
from anabranch.core.errors import AnabranchError, ConfigError, NotAuthenticated, Unavailable
from anabranch.core.model.updates import NO_WIDTH, is_width
from anabranch.identity.addresses import is_loopback, split_job
from anabranch.identity.wallet import Wallet, read_wallet
from anabranch.workloads.app import App, Shard, load_app
from anabranch.workloads.calls import join_run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClientOptions:
    """One device. `server`: `host:port`, or several with commas between them, of which one leads.

    One of `name://...` is for a transport of others.

    `client_id` empty: one is made up once and kept in `state_dir`.

    `shard` is its part of the training data, (index, count), split as the run's configuration says; None: see
    `placed`. `options` are told to the App. `threads`: for torch on a CPU, 0 for its part of what
    torch would take, shared with the other devices on this machine. `step_time_s`, `width_max`, `outbox`: see
    `Agent`.

    `token` and `ca_sha256` are what it joins with, at `join` (several as for `server`; empty: two ports above
    each server's); afterwards its papers lie in `identity`, or else in `state_dir`, and name it. `insecure`
    allows another machine's server in the clear. `trust`: the keepers that it masks for.
    """

    app: str
    server: str = "127.0.0.1:7070"
    client_id: str = ""
    shard: tuple[int, int] | None = None
    state_dir: Path = Path("anabranch-device")
    data_path: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    precision: str = "auto"
    step_time_s: float = 0.0
    width_max: float = 1.0
    tasks_max: int = 0
    threads: int = 0
    identity: Path | None = None
    token: str = field(default="", repr=False)
    ca_sha256: str = ""
    join: str = ""
    insecure: bool = False
    retry_base_s: float = ClientTable.retry_base_s
    retry_cap_s: float = ClientTable.retry_cap_s
    outbox: OutboxBounds = field(default_factory=OutboxBounds)
    trust: KeeperTrust = field(default_factory=KeeperTrust)

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if not is_width(self.width_max):
            raise ConfigError(f"width_max {NO_WIDTH}, not {self.width_max!r}")
        if self.shard is not None and not is_shard(self.shard):
            raise ConfigError(
                f"shard is {self.shard!r}: give (index, count), the index from 0, such as (3, 8)"
            )
        for name in ("tasks_max", "threads"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 0:
                raise ConfigError(f"{name} is {value!r}: give a whole number, or 0 for no bound of yours")
        pace: Any = self.step_time_s
        if not isinstance(pace, Real) or not 0 <= float(pace) < math.inf:
            raise ConfigError(f"step_time_s is {pace!r}: give seconds, 0 or more")
        options: Any = self.options
        if not isinstance(options, Mapping):
            raise ConfigError(f"options is a {type(options).__name__}: give a dict, for the App to read")


@dataclass(frozen=True)
class FollowerOptions:
    """One follower. `admin` empty: nothing is reported; `role`: `test` or `validation`.

    `seed` must be the run's, so that the validation part is the one that no device trains on; None
    takes it from the operators' service, or is 0 without one. `identity`: the folder of an operator's papers,
    which both ports want where they are guarded. `state_dir`: of a device, for its own buffers. `options` are
    told to the App.
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
    identity: Path | None = None
    insecure: bool = False
    state_dir: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def run_client(
    options: ClientOptions,
    on_event: OnEvent | None = None,
    app: App | None = None,
    bell: Bell | None = None,
) -> AgentSummary:
    """Run a device until the run ends, `tasks_max` is reached, or SIGTERM or SIGINT. See `Agent.run`.

    `app` stands in for the one that the options name. `bell.stop()`, from any thread, ends it as well.
    """
    home = options.state_dir.absolute()
    app, bell = app or load_app(options.app, options.data_path), bell or Bell()
    app.options = options.options
    try:
        wallet = device_wallet(options, bell)
    except Interrupted as reason:  # while it waited to join
        return AgentSummary("", str(reason))
    client_id = device_id(options.state_dir, options.client_id if wallet is None else wallet.name)

    def shard(config: Mapping[str, Any]) -> Shard:
        found = placed(app, client_id, options.shard, config)
        if on_event is not None:
            by = "own_data" if found.own else "name" if options.shard is None else "shard"
            state_dir = str(options.state_dir)
            on_event(
                "placed", client=client_id, index=found.index, count=found.count, by=by, state_dir=state_dir
            )
        return found

    def work(transport: Transport, neighbours: Neighbours) -> AgentSummary:
        near = None if options.threads else neighbours
        agent = agent_of(options, app, transport, client_id, shard, on_event, bell, near)
        on_return = getattr(transport, "on_return", None)  # gRPC's has it, and what is based on that
        if on_return is not None:
            on_return(agent.hasten)
        return agent.run()

    while True:
        with Neighbours() as neighbours, open_transport(options.server, client_id, wallet) as transport:
            try:
                return work(transport, neighbours)
            except HistoryRestored as restored:
                log.warning("%s: what is of lost versions is discarded, and the device goes on", restored)
                forget_run(home)
                wallet = None if wallet is None else read_wallet(wallet.folder)  # it may have been renewed


def agent_of(
    options: ClientOptions,
    app: App,
    transport: Transport,
    client_id: str,
    shard: Callable[[Mapping[str, Any]], Shard],
    on_event: OnEvent | None,
    bell: Bell,
    neighbours: Neighbours | None = None,
) -> Agent:
    """The device that the options describe, on any transport; `shard`: its part of the data, by the run's."""
    settings = ClientTable(
        device=options.device,
        precision=options.precision,
        retry_base_s=options.retry_base_s,
        retry_cap_s=options.retry_cap_s,
    )
    return Agent(
        app,
        transport,
        client_id,
        shard,
        options.state_dir,
        settings,
        tasks_max=options.tasks_max,
        step_time_s=options.step_time_s,
        width_max=options.width_max,
        threads=options.threads,
        neighbours=neighbours,
        on_event=on_event,
        bell=bell,
        outbox=options.outbox,
        trust=options.trust,
    )


def device_wallet(options: ClientOptions, bell: Bell | None = None) -> Wallet | None:
    """A device's papers, joined for if need be; None: it speaks in the clear.

    It waits for a server that is not there yet. Raises `ConfigError`, `NotAuthenticated`.
    """
    folder = (options.identity or options.state_dir / "identity").absolute()
    known = read_wallet(folder)
    if is_foreign(options.server):  # it has its own ways to say who is who
        return known
    if options.insecure and (known is not None or options.token):
        raise ConfigError("--insecure, but this device has an identity: drop --insecure, or the identity")
    if options.token:
        addresses, bell = join_addresses(options.server, options.join), bell or Bell()
        waiting = WaitingNotice(",".join(addresses))
        whose = options.client_id or settled_id(options.state_dir)
        with locked(options.state_dir), interruptible(bell):
            known = persist(
                lambda: joined_wallet(folder, addresses, options.token, options.ca_sha256, whose),
                bell,
                fresh_seed(),
                options.retry_base_s,
                options.retry_cap_s,
                waiting.failed,
            )
        waiting.answered()
    if known is None:
        check_plain(options.server, options.insecure)
        return None
    if options.client_id not in ("", known.name):
        raise ConfigError(
            f"--id {options.client_id!r}, but this device's certificate is of {known.name!r} ({folder}): "
            f"leave out --id, or give {options.client_id!r} a token and a --state-dir of its own"
        )
    return known


def follow(options: FollowerOptions, on_end: Callable[[], None] | None = None) -> Iterator[Measurement]:
    """Measure a run's versions as they come, once its server is there. See `Follower`."""
    with suppress(Interrupted):
        yield from _follow(options, on_end)


def _follow(options: FollowerOptions, on_end: Callable[[], None] | None) -> Iterator[Measurement]:
    app = load_app(options.app, options.data_path)
    app.options = options.options
    wallet = operator_wallet(options.identity)
    if wallet is None:
        check_plain(options.server, options.insecure)
    waiting = WaitingNotice(options.server)

    def failed(error: AnabranchError) -> None:
        if wallet is None and isinstance(error, Unavailable):
            check_not_guarded(transport.address)  # which no waiting mends
        waiting.failed(error)

    with ExitStack() as stack:
        name = f"follower-{fresh_id()[:8]}"
        transport = stack.enter_context(GrpcTransport(options.server, name, wallet=wallet))
        sink, status = _reporting(options, wallet, stack) if options.admin else (None, None)
        seed, config = options.seed, None if status is None else status.config
        if config is not None:
            join_run(app, config)
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
            neighbours=None if options.threads else stack.enter_context(Neighbours()),
            on_failure=failed,
            on_answer=waiting.answered,
            on_end=on_end,
            kept=None if options.state_dir is None else own_buffers(options.state_dir),
            goal=Goal.of_json(config or {}),
            config=config,
            frozen_sha256="" if status is None else status.frozen_sha256,
            served=None if sink is None else sink.model(),
        )


def _reporting(
    options: FollowerOptions, wallet: Wallet | None, stack: ExitStack
) -> tuple[OperatorClient, RunStatus]:
    """The operators' port, and how the run stands, once its server is there.

    On its own machine a server whose devices' port wants papers has this one in the clear, unless it is told
    otherwise: there they are shown if they are asked for.
    """
    here = is_loopback(split_job(options.admin)[0])
    operator = stack.enter_context(open_operator(options.admin, None if here else wallet, options.insecure))
    try:
        return operator, _status(operator)
    except NotAuthenticated:
        if wallet is None or not here:
            raise
    operator = stack.enter_context(open_operator(options.admin, wallet))
    return operator, _status(operator)


def _status(operator: OperatorClient) -> RunStatus:
    """How the run stands, as soon as its server is there."""
    bell, table, waiting = Bell(), ClientTable(), WaitingNotice(operator.address)
    with interruptible(bell):
        status = persist(
            operator.status, bell, fresh_seed(), table.retry_base_s, table.retry_cap_s, waiting.failed
        )
    waiting.answered()
    return status


def own_buffers(state_dir: Path) -> Keepsake:
    """What a device has of its own. Raises `ConfigError` where it has nothing."""
    found = keepsake_in(state_dir / "kept")
    if not found.buffers:
        raise ConfigError(
            f"{state_dir} has no buffers of a device's own: those need model.buffers = 'local' and a result"
        )
    return Keepsake(buffers=found.buffers)
