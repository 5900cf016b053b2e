"""The gRPC ports: for devices, for operators, and with TLS one to join.

Health on the first two, reflection on the operators'.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from anabranch.core.errors import PortInUse
from anabranch.core.limits import Limits
from anabranch.identity.certificates import Kind
from anabranch.protos.v1 import operators_pb2
from anabranch.protos.v1.devices_pb2_grpc import add_DevicesServicer_to_server
from anabranch.protos.v1.identity_pb2_grpc import add_JoiningServicer_to_server
from anabranch.protos.v1.operators_pb2_grpc import add_OperatorsServicer_to_server
from anabranch.server.gate import Gate
from anabranch.server.joining import Joining
from anabranch.server.operators import Operators
from anabranch.server.rpc import Devices
from anabranch.server.run import LiveRun
from anabranch.server.tls import ServerIdentity, join_address, uses_tls

# What a probe may ask for: the process, its life, its readiness to aggregate.
HEALTH_NAMES = ("", "liveness", "aggregator")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def options(limits: Limits) -> list[tuple[str, int]]:
    """What gRPC itself enforces. Times in milliseconds."""
    return [
        ("grpc.max_receive_message_length", limits.message_bytes_max),
        ("grpc.max_send_message_length", limits.message_bytes_max),
        ("grpc.max_metadata_size", limits.metadata_bytes_max),
        ("grpc.max_allowed_incoming_connections", limits.connections_max),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.max_connection_idle_ms", 120_000),
        ("grpc.max_connection_age_ms", 30 * 60_000),
        ("grpc.max_connection_age_grace_ms", 60_000),
        ("grpc.server_handshake_timeout_ms", 10_000),
        # A fixed window: left alone, gRPC reads ahead of a busy server by tens of megabytes a stream.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", limits.message_bytes_max),
        ("grpc.so_reuseport", 0),  # a second server on the same port is a mistake, not a cluster
    ]


class Ports:
    """Opens the ports of a run. The addresses have the real ports, once open.

    With an `identity` the ports use mutual TLS, but for those that only this machine reaches, unless
    `identity.tls` is `always`; and devices may join on `join_address`, which is empty without one.
    """

    def __init__(self, run: LiveRun, identity: ServerIdentity | None, insecure: bool = False) -> None:
        self._run, self._identity, self._insecure = run, identity, insecure
        self.address = self.admin_address = self.join_address = ""
        self._health = health.aio.HealthServicer()
        self._servers: list[Any] = []

    async def open(self) -> None:
        """Take calls. Raises `PortInUse`."""
        run, table = self._run, self._run.config.server
        try:
            kinds = (Kind.DEVICE, Kind.OPERATOR)  # an operator may look on: see `Devices.FetchModel`
            identity = self._guard(table.address)
            server = self._server()
            add_DevicesServicer_to_server(Devices(run, _gate(identity, kinds)), server)
            self.address = await self._start(server, table.address, identity)
            await self._open_for_operators(table.admin_address)
            if identity is not None:
                server = self._server_to_join()
                joining = Joining(identity.authority, run.config.identity.certificate_s, run.limits)
                add_JoiningServicer_to_server(joining, server)
                self.join_address = await self._start(
                    server, join_address(run.config), identity, clients=False
                )
        except PortInUse:
            await self.close(0)
            raise
        await self._tell_health(SERVING)

    async def _open_for_operators(self, address: str) -> None:
        identity, server = self._guard(address), self._server()
        add_OperatorsServicer_to_server(Operators(self._run, _gate(identity, [Kind.OPERATOR])), server)
        names = [operators_pb2.DESCRIPTOR.services_by_name["Operators"].full_name]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        self.admin_address = await self._start(server, address, identity)

    async def close(self, grace_s: float) -> None:
        """Say NOT_SERVING, take no more calls, and give those under way `grace_s` seconds."""
        await self._tell_health(NOT_SERVING)
        for server in self._servers:
            await server.stop(grace_s)

    def _guard(self, address: str) -> ServerIdentity | None:
        """What the port on this address shows; None: it is plain."""
        return self._identity if uses_tls(address, self._run.config, self._insecure) else None

    def _server(self) -> Any:
        limits = self._run.limits
        server = aio.server(options=options(limits), maximum_concurrent_rpcs=limits.rpcs_max)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        return server

    def _server_to_join(self) -> Any:
        """For strangers: few calls at a time, and no connection for long."""
        limits = self._run.limits
        age_ms = round(1000 * limits.join_connection_s_max)
        of_strangers = {
            "grpc.max_connection_idle_ms": age_ms,
            "grpc.max_connection_age_ms": age_ms,
            "grpc.max_connection_age_grace_ms": age_ms // 2,
        }
        chosen = list((dict(options(limits)) | of_strangers).items())
        return aio.server(options=chosen, maximum_concurrent_rpcs=limits.joins_at_once_max)

    async def _start(
        self, server: Any, address: str, identity: ServerIdentity | None, clients: bool = True
    ) -> str:
        """Serve on an address; returns it with its real port. `clients`: they show certificates."""
        try:
            if identity is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, identity.credentials(clients))
        except RuntimeError as error:
            raise PortInUse(f"{address} cannot be served on, it is taken or not ours: {error}") from error
        await server.start()
        self._servers.append(server)
        return f"{address.rpartition(':')[0]}:{port}"

    async def _tell_health(self, status: Any) -> None:
        for name in HEALTH_NAMES:
            await self._health.set(name, status)


def _gate(identity: ServerIdentity | None, kinds: Collection[Kind]) -> Gate:
    return Gate() if identity is None else Gate(identity.authority, kinds)
