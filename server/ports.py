"""The two gRPC ports: one for devices, one for operators. Health on both, reflection on the latter."""

from __future__ import annotations

import contextlib
import ipaddress
import resource
from typing import Any

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from anabranch.core.config import Config
from anabranch.core.errors import ConfigError, PortInUse
from anabranch.core.limits import KIB, Limits
from anabranch.protos.v1 import operators_pb2
from anabranch.protos.v1.devices_pb2_grpc import add_DevicesServicer_to_server
from anabranch.protos.v1.operators_pb2_grpc import add_OperatorsServicer_to_server
from anabranch.server.operators import Operators
from anabranch.server.rpc import Devices
from anabranch.server.run import LiveRun
from anabranch.server.unreadable import ReadsRequests

# What a probe may ask for: the process, its life, its readiness to aggregate.
HEALTH_NAMES = ("", "liveness", "aggregator")
LOOKAHEAD_BYTES = 64 * KIB  # of a stream that nobody reads
OPERATORS_MAX = 100  # connections of the operators' port
FILES_KEPT = 512 + OPERATORS_MAX  # open files for all else: the database, payloads, models
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def check_address(address: str, insecure: bool) -> None:
    """Raises `ConfigError` for an address that is malformed, or open to others without need."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit()):
        raise ConfigError(f"address {address!r}: write host:port, for example 127.0.0.1:7070")
    if not insecure and not _is_loopback(host):
        raise ConfigError(
            f"address {address!r} can be reached by other machines and nothing is encrypted: "
            "use 127.0.0.1, or say --insecure"
        )


def options(limits: Limits, connections: int) -> list[tuple[str, int]]:
    """What gRPC itself enforces, on a port of so many connections. Times in milliseconds."""
    return [
        ("grpc.max_receive_message_length", limits.message_bytes_max),
        ("grpc.max_send_message_length", limits.message_bytes_max),
        ("grpc.max_metadata_size", limits.metadata_bytes_max),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes_max),  # gRPC draws lots between the two
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_concurrent_streams", limits.streams_max),
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
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft - FILES_KEPT))


class Ports:
    """Opens both ports for a run. `address` and `admin_address` have the real ports, once open."""

    status: int = SERVING

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._begin(run.config, run.limits)

    def _begin(self, config: Config, limits: Limits) -> None:
        self._table, self._limits = config.server, limits
        self.address = self.admin_address = ""
        self._health = health.aio.HealthServicer()
        self._servers: list[Any] = []

    async def open(self) -> None:
        """Take calls. Raises `PortInUse`."""
        table = self._table
        self.address = await self._open(table.address, admin=False)
        try:
            self.admin_address = await self._open(table.admin_address, admin=True)
        except PortInUse:
            await self.close(0)
            raise
        await self._tell_health(self.status)

    async def close(self, grace_s: float) -> None:
        """Say NOT_SERVING, take no more calls, and give those under way `grace_s` seconds."""
        await self._tell_health(NOT_SERVING)
        for server in self._servers:
            await server.stop(grace_s)

    async def _open(self, address: str, admin: bool) -> str:
        limits = self._limits
        server = aio.server(
            interceptors=[ReadsRequests()],
            options=options(limits, OPERATORS_MAX if admin else connections_within(limits.connections_max)),
            maximum_concurrent_rpcs=limits.rpcs_max,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._add_services(server, admin)
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise PortInUse(f"{address} cannot be served on, it is taken or not ours: {error}") from error
        await server.start()
        self._servers.append(server)
        return f"{address.rpartition(':')[0]}:{port}"

    def _add_services(self, server: Any, admin: bool) -> None:
        if not admin:
            add_DevicesServicer_to_server(Devices(self._run), server)
            return
        add_OperatorsServicer_to_server(Operators(self._run), server)
        names = [operators_pb2.DESCRIPTOR.services_by_name["Operators"].full_name]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)

    async def _tell_health(self, status: Any) -> None:
        for name in HEALTH_NAMES:
            await self._health.set(name, status)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
