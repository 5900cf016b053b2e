"""The gRPC ports: for devices, for operators, and with TLS one to join.

Health on the first two, reflection on the operators'.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from anabranch.core.config.tables import Config
from anabranch.core.errors import PortInUse
from anabranch.core.limits import KIB, Limits
from anabranch.identity.addresses import JOIN_PORT_AFTER, host_and_port
from anabranch.identity.certificates import Kind
from anabranch.protos.v1 import jobs_pb2, operators_pb2
from anabranch.protos.v1.devices_pb2_grpc import add_DevicesServicer_to_server
from anabranch.protos.v1.identity_pb2_grpc import add_JoiningServicer_to_server
from anabranch.protos.v1.jobs_pb2_grpc import add_JobsServicer_to_server
from anabranch.protos.v1.operators_pb2_grpc import add_OperatorsServicer_to_server
from anabranch.server.counting import CountsCalls
from anabranch.server.exchange import DevicesAndExchange, add_exchange
from anabranch.server.gate import EVERYBODY, Gate, Scope
from anabranch.server.job import HostedJob
from anabranch.server.job_list import ListsJobs
from anabranch.server.joining import Joining
from anabranch.server.metrics import Metrics
from anabranch.server.operators import Operators
from anabranch.server.outage import Outage
from anabranch.server.places import Places, TakesPlaces
from anabranch.server.run import LiveRun
from anabranch.server.tls import ServerIdentity, join_address, uses_tls
from anabranch.server.unreadable import ReadsRequests
from anabranch.support.grpc_ports import serve_on

log = logging.getLogger(__name__)

# What a probe may ask for: the process, its life, its readiness to aggregate.
HEALTH_NAMES = ("", "liveness", "aggregator")
LOOKAHEAD_BYTES = 64 * KIB  # of a stream that nobody reads
OPERATORS_MAX = 100  # connections of the operators' port
STRANGERS_MAX = 200  # of the port to join
FILES_KEPT = 512 + OPERATORS_MAX + STRANGERS_MAX  # open files for all else: the database, payloads, models
OPERATORS = (Kind.OPERATOR,)
CALLERS = (Kind.DEVICE, Kind.OPERATOR)  # of the devices' port: an operator may look on (`Devices.FetchModel`)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def options(limits: Limits, connections: int) -> list[tuple[str, int]]:
    """What gRPC itself enforces, on a port of so many connections. Times in milliseconds."""
    return [
        ("grpc.max_receive_message_length", limits.message_bytes_max),
        ("grpc.max_send_message_length", limits.message_bytes_max),
        ("grpc.max_metadata_size", limits.metadata_bytes_max),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes_max),  # gRPC draws lots between the two
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_concurrent_streams", limits.streams_max),
        # Two, between which gRPC draws lots. The server begins one call of a kind a turn of its loop: what
        # waits longer than devices do is better ended at once.
        ("grpc.server.max_pending_requests", limits.rpcs_waiting_max),
        ("grpc.server.max_pending_requests_hard_limit", limits.rpcs_waiting_max),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 4_000),  # a device with a call under way: every 5 s
        ("grpc.max_connection_idle_ms", 120_000),
        ("grpc.max_connection_age_ms", 30 * 60_000),
        ("grpc.max_connection_age_grace_ms", 60_000),
        ("grpc.server_handshake_timeout_ms", round(1000 * limits.handshake_s)),
        # A fixed window: left alone, gRPC reads ahead of a busy server by tens of megabytes a stream. For a
        # message that is awaited it makes the window as large as that.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.experimental.tcp_max_read_chunk_size", LOOKAHEAD_BYTES),  # else up to 4 MiB a connection
        ("grpc.so_reuseport", 0),  # a second server on the same port is a mistake, not a cluster
    ]


def connections_within(most: int) -> int:
    """How many connections of devices leave files for the store; the soft limit of open files is raised.

    A flood of connections that takes the last file would stop the database.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems have a lower limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft - FILES_KEPT >= most:
        return most
    left = max(1, soft - FILES_KEPT)
    log.warning(
        "this process may have %d files open, so of the devices at most %d may be connected at a time, "
        "not %d: raise the hard limit (ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of Docker) to %d",
        *(soft, left, most, most + FILES_KEPT),
    )
    return left


class Ports(ABC):
    """Opens ports for devices and operators. The addresses have the real ports, once open.

    With an `identity` the ports use mutual TLS, but for those that only this machine reaches, unless
    `identity.tls` is `always`; and devices may join on `join_address`, which is empty without one.
    """

    status: int = SERVING

    def __init__(
        self,
        config: Config,
        limits: Limits,
        identity: ServerIdentity | None,
        insecure: bool = False,
        metrics: Metrics | None = None,
        outage: Outage | None = None,
    ) -> None:
        self._config, self._limits = config, limits
        self._identity, self._insecure = identity, insecure
        self.address = self.admin_address = self.join_address = ""
        self._health = health.aio.HealthServicer()
        self._servers: list[Any] = []
        self._metrics = metrics
        # The run's, where there is one: a register that fails there and here is said once.
        self._outage = outage or Outage()

    @abstractmethod
    def _add_services(self, server: Any, admin: bool, identity: ServerIdentity | None) -> None:
        """What is called on a port, but for health: the operators' if `admin`, else the devices'."""

    async def open(self) -> None:
        """Take calls. Raises `PortInUse`."""
        table = self._config.server
        try:
            self.address = await self._open(table.address, admin=False)
            self.admin_address = await self._open(table.admin_address, admin=True)
            if (identity := self._guard(table.address)) is not None:
                self.join_address = await self._open_to_join(identity)
            await self._tell_health(self.status)
        except BaseException:
            await self.close(0)
            raise

    async def close(self, grace_s: float) -> None:
        """Say NOT_SERVING, take no more calls on any port, and give all those under way `grace_s` seconds."""
        await self._tell_health(NOT_SERVING)
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    def _guard(self, address: str) -> ServerIdentity | None:
        """What the port on this address shows; None: it is plain."""
        return self._identity if uses_tls(address, self._config, self._insecure) else None

    async def _open(self, address: str, admin: bool) -> str:
        limits, identity = self._limits, self._guard(address)
        credentials = None if identity is None else identity.credentials(clients=True)
        server = aio.server(
            interceptors=self._interceptors(self._takes_places(admin, identity)),
            options=options(limits, OPERATORS_MAX if admin else connections_within(limits.connections_max)),
            maximum_concurrent_rpcs=limits.rpcs_max,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._add_services(server, admin, identity)
        setting = "server.admin_address" if admin else "server.address"
        return await self._start(server, setting, address, credentials)

    def _interceptors(self, behind_counting: Sequence[TakesPlaces] = ()) -> list[aio.ServerInterceptor]:
        """Of one port: they remember its handlers, which must never answer on another."""
        counting = [] if self._metrics is None else [CountsCalls(self._metrics)]
        return [*counting, *behind_counting, ReadsRequests()]

    def _takes_places(self, admin: bool, identity: ServerIdentity | None) -> list[TakesPlaces]:
        """Where there are members. An operator may have as many calls as it likes on its own port.

        And is told there what is wrong with the register.
        """
        if identity is None:
            return []
        limits, gate = self._limits, gate_of(identity, OPERATORS if admin else CALLERS, job=None)
        if admin:
            return [TakesPlaces(gate, None, limits.upload_idle_s)]
        return [TakesPlaces(gate, Places(limits.member_calls_max), limits.upload_idle_s, self._outage)]

    async def _open_to_join(self, identity: ServerIdentity) -> str:
        """For strangers: few calls at a time, and no connection for long."""
        limits = self._limits
        age_ms = round(1000 * limits.join_connection_s_max)
        of_strangers = {
            "grpc.max_connection_idle_ms": age_ms,
            "grpc.max_connection_age_ms": age_ms,
            "grpc.max_connection_age_grace_ms": age_ms // 2,
        }
        credentials = identity.credentials(clients=False)
        server = aio.server(
            interceptors=self._interceptors(),
            options=list((dict(options(limits, STRANGERS_MAX)) | of_strangers).items()),
            maximum_concurrent_rpcs=limits.joins_at_once_max,
        )
        joining = Joining(identity.members, self._config.identity.certificate_s, limits, self._outage)
        add_JoiningServicer_to_server(joining, server)
        setting = f"identity.join_address (without it {JOIN_PORT_AFTER} after server.address)"
        return await self._start(server, setting, join_address(self._config), credentials)

    async def _start(
        self, server: aio.Server, setting: str, address: str, credentials: grpc.ServerCredentials | None
    ) -> str:
        """Serve on the address of a setting; returns it with its real port."""
        try:
            port = await serve_on(server, address, credentials)
        except RuntimeError as error:
            why = why_not_served(address) or error
            raise PortInUse(f"{setting}: {address} cannot be served on: {why}") from error
        self._servers.append(server)
        return f"{address.rpartition(':')[0]}:{port}"

    async def _tell_health(self, status: Any) -> None:
        for name in HEALTH_NAMES:
            await self._health.set(name, status)


class RunPorts(Ports):
    """Those of a server of one run."""

    def __init__(self, run: LiveRun, insecure: bool = False) -> None:
        super().__init__(run.config, run.limits, run.identity, insecure, run.writer.metrics, run.outage)
        self._run = run

    def _add_services(self, server: Any, admin: bool, identity: ServerIdentity | None) -> None:
        gate = gate_of(identity, OPERATORS if admin else CALLERS)
        jobs = ListsJobs(lambda: [HostedJob.only(self._run)], gate, admin, self._run.calls, self._limits)
        add_JobsServicer_to_server(jobs, server)
        if not admin:
            servicer = DevicesAndExchange(self._run, gate)
            add_DevicesServicer_to_server(servicer, server)
            add_exchange(servicer, server)
            return
        add_OperatorsServicer_to_server(Operators(self._run, gate), server)
        reflect(server)


def reflect(server: Any) -> None:
    """Let an operators' port tell what it serves."""
    files = (operators_pb2.DESCRIPTOR, jobs_pb2.DESCRIPTOR)
    names = [service.full_name for file in files for service in file.services_by_name.values()]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)


def gate_of(
    identity: ServerIdentity | None,
    kinds: Collection[Kind],
    job: str | None = "",
    scope: Callable[[], Scope] = lambda: EVERYBODY,
) -> Gate:
    """Of a port with this identity, and of one of its runs: see `Gate`."""
    return Gate(None if identity is None else identity.members, kinds, job, scope)


def why_not_served(address: str) -> str:
    """Why an address cannot be served on, in the system's words; gRPC has them only for who debugs it."""
    host, port = host_and_port(address)
    try:
        for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as tried:
                tried.bind(where)
    except OSError as error:
        return error.strerror or str(error)
    return ""
