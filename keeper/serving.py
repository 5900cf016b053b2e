"""A keeper's port: TLS with the certificate that its name is the digest of, `Keepers`, and health."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from anabranch.core.errors import (
    ERROR_KEY,
    FALLBACK,
    AnabranchError,
    InvalidUpdate,
    PortInUse,
    StoreError,
    TooLarge,
    outcome_of,
)
from anabranch.core.limits import COHORT_BYTES_MAX, COHORT_MAX, COHORT_MEMBER_BYTES_MAX, MIB
from anabranch.core.secagg.cohort import Cohort
from anabranch.identity.addresses import SERVER_NAME, host_and_port
from anabranch.identity.certificates import certificate_pem
from anabranch.keeper.keeper import Keeper, Unmasked
from anabranch.keeper.papers import KeeperPapers
from anabranch.keeper.rules import Declined
from anabranch.protos.convert import cohort_from_proto
from anabranch.protos.v1 import keepers_pb2 as keepers
from anabranch.protos.v1 import model_pb2 as model
from anabranch.protos.v1.keepers_pb2_grpc import KeepersServicer, add_KeepersServicer_to_server
from anabranch.support.grpc_ports import serve_on
from anabranch.support.stop_signals import call_on_signals, stop_signals

log = logging.getLogger(__name__)

# What strangers can have this process hold: so many cohorts on their way, of `COHORT_BYTES_MAX` each.
CALLS_MAX = 8
CHUNK_BYTES = MIB
READ_S = 60.0  # for a cohort to come in
DRAIN_S = 10.0
HEALTH_S = 5.0
SERVING = health_pb2.HealthCheckResponse.SERVING
OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 16 * MIB))

Told = Callable[[Cohort, Unmasked | Declined], None]
Context = aio.ServicerContext[Any, Any]


class KeeperService(KeepersServicer):
    """The calls. `told` hears what became of each cohort."""

    def __init__(self, keeper: Keeper, told: Told) -> None:
        self._keeper, self._told, self._trouble = keeper, told, ""
        said = keeper.papers.statement()
        self._statement = model.KeeperKey(
            certificate=said.certificate, public_key=said.public_key, signature=said.signature
        )

    async def GetKey(  # noqa: N802 - gRPC's name
        self, request: keepers.GetKeyRequest, context: Context
    ) -> keepers.GetKeyResponse:
        """What this keeper says of itself."""
        del request, context
        return keepers.GetKeyResponse(key=self._statement)

    async def Unmask(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[keepers.UnmaskRequest], context: Context
    ) -> AsyncIterator[keepers.UnmaskResponse]:
        """The sum of a cohort's masks, or why there is none."""
        try:
            cohort = await _read_in_time(request_iterator)
            found = await asyncio.to_thread(self._keeper.unmask, cohort)
        except Exception as error:  # noqa: BLE001 - the last line of defence of a call
            if isinstance(error, StoreError):
                self._say(str(error))
            await _abort(context, error)
            return
        self._say("")
        self._told(cohort, found)
        if isinstance(found, Declined):
            refusal = keepers.UnmaskRefusal(reason=found.why.value, detail=found.detail)
            yield keepers.UnmaskResponse(refusal=refusal)
            return
        head: keepers.MaskSum | None = keepers.MaskSum(
            cohort_sha256=bytes.fromhex(found.cohort_sha256),
            size_bytes=len(found.numbers),
            sha256=bytes.fromhex(found.sha256),
            signature=found.signature,
        )
        for offset in range(0, len(found.numbers), CHUNK_BYTES):
            data = found.numbers[offset : offset + CHUNK_BYTES]
            yield keepers.UnmaskResponse(sum=head, offset=offset, data=data)
            head = None

    def _say(self, trouble: str) -> None:
        """Of a disk that fails the keeper's people are told, once: a server asks every two seconds."""
        if trouble and trouble != self._trouble:
            log.error("no sum can be answered: %s", trouble)
        self._trouble = trouble


async def _read_in_time(requests: AsyncIterator[keepers.UnmaskRequest]) -> Cohort:
    try:
        return await asyncio.wait_for(_read(requests), READ_S)
    except TimeoutError:
        raise InvalidUpdate(f"the cohort did not come in within {READ_S:g} s") from None


async def _read(requests: AsyncIterator[keepers.UnmaskRequest]) -> Cohort:
    """A cohort, whole. Raises `InvalidUpdate`, `TooLarge`, `ConfigError`."""
    head: keepers.CohortHead | None = None
    members: list[keepers.CohortMember] = []
    size_bytes = 0
    async for request in requests:
        size_bytes += request.ByteSize()
        if size_bytes > COHORT_BYTES_MAX:
            raise TooLarge(f"a cohort has {COHORT_BYTES_MAX} bytes at most")
        if head is None:
            if not request.HasField("head"):
                raise InvalidUpdate("the first message must have the cohort's head")
            head = request.head
        members += request.members
        if len(members) > min(head.members, COHORT_MAX):
            raise TooLarge(f"more than the {head.members} members that were said, or than {COHORT_MAX}")
        if any(member.ByteSize() > COHORT_MEMBER_BYTES_MAX for member in request.members):
            raise TooLarge(f"a member of a cohort has {COHORT_MEMBER_BYTES_MAX} bytes at most")
    if head is None or len(members) < head.members:
        raise InvalidUpdate("the cohort broke off: fewer members than its head says")
    return cohort_from_proto(head, members)


async def _abort(context: Context, error: Exception) -> None:
    if not isinstance(error, AnabranchError):
        log.error("a call failed", exc_info=error)
        await context.abort(grpc.StatusCode[FALLBACK.grpc_status], "the keeper failed; its log says why")
    status = grpc.StatusCode[outcome_of(error).grpc_status]
    metadata = ((ERROR_KEY, type(error).__name__),)
    await context.abort(status, str(error), metadata)


async def _port(
    keeper: Keeper, address: str, told: Told
) -> tuple[aio.Server, health.aio.HealthServicer, str]:
    """A port that is open, and where. Raises `PortInUse`, `ConfigError`."""
    host, _ = host_and_port(address)
    credentials = grpc.ssl_server_credentials([keeper.papers.credentials()])
    server = aio.server(options=OPTIONS, maximum_concurrent_rpcs=CALLS_MAX)
    status = health.aio.HealthServicer()
    add_KeepersServicer_to_server(KeeperService(keeper, told), server)
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    try:
        port = await serve_on(server, address, credentials)
    except RuntimeError as error:
        raise PortInUse(
            f"{address} cannot be served: another process has the port, or it is not this machine's"
        ) from error
    await status.set("", SERVING)
    return server, status, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def serves(papers: KeeperPapers, address: str) -> bool:
    """Whether this keeper, and no other, answers at an address and serves. Never raises for a no."""
    host_and_port(address)
    credentials = grpc.ssl_channel_credentials(certificate_pem(papers.certificate))
    options = (("grpc.ssl_target_name_override", SERVER_NAME),)
    with grpc.secure_channel(address, credentials, options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            said = stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_S)
        except grpc.RpcError:
            return False
    return bool(said.status == SERVING)


async def serve(
    keeper: Keeper, address: str, ready: Callable[[str], None], told: Told, stop: threading.Event
) -> None:
    """Serve until one of `stop_signals` or `stop`; what is being answered then is answered.

    `ready` is told the address. Raises `PortInUse`, `ConfigError`.
    """
    server, status, where = await _port(keeper, address, told)
    call_on_signals(stop.set, *stop_signals())
    try:
        ready(where)
        await asyncio.to_thread(stop.wait)
    finally:
        await status.enter_graceful_shutdown()
        await server.stop(DRAIN_S)
