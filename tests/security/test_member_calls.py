"""One member has its share of the calls that a server has under way, and no more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from guarded import Federation, federation, issued
from job_hosts import Host, with_job
from wire import CALL_S

from anabranch.client.channel import open_channel, secure_channel
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.params import Tensors
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import Kind, certificate_pem
from anabranch.identity.wallet import Wallet
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub
from anabranch.server.gate import Gate
from anabranch.server.job import JobState
from anabranch.server.members import Members
from anabranch.server.places import TakesPlaces

LARGE: Tensors = {"w": np.zeros(1_000_000, np.float32)}
LIMITS = replace(DEFAULT_LIMITS, rpcs_max=6, member_calls_max=4, early_calls_at_once=1000)
TRIED = 12
# So little comes of a download that nobody reads.
NARROW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.use_local_subchannel_pool", 1),
]


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[Federation]:
    """A guarded server with six places, of which a member has four."""
    with federation(tmp_path, LARGE, LIMITS) as made:
        yield made


def narrow(crowded: Federation, wallet: Wallet) -> DevicesStub:
    """A member that reads nothing of itself."""
    return crowded.stub(secure_channel(crowded.address, NARROW, *wallet.credentials()))


def until(calls: list[Any], done: int) -> None:
    """Wait until so many of them have ended."""
    latest = time.monotonic() + CALL_S
    while sum(call.done() for call in calls) < done:
        assert time.monotonic() < latest, f"{sum(call.done() for call in calls)} of {done} have ended"
        time.sleep(0.01)


def is_refused(stub: DevicesStub, client_id: str) -> bool:
    """Whether one more call of a member is one too many; any other error is raised."""
    try:
        stub.QueryUpload(devices.QueryUploadRequest(client_id=client_id, update_id="u"), timeout=CALL_S)
    except grpc.RpcError as error:
        said: Any = error
        if dict(said.trailing_metadata())["anabranch-error"] != "Overloaded":
            raise
        assert "has 4 calls under way, as many as one may (limits.member_calls_max)" in said.details()
        return True
    return False


def check_share(crowded: Federation, mallory: DevicesStub, calls: list[Any]) -> None:
    """Four of the calls are under way, the others refused; another member has its updates taken."""
    until(calls, TRIED - 4)
    assert {call.code() for call in calls if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert is_refused(mallory, "mallory")
    honest = crowded.device(crowded.joined("honest"))
    honest.enrol()
    assert honest.work().version == 1
    assert sum(not call.done() for call in calls) == 4


def check_given_back(mallory: DevicesStub) -> None:
    """What has ended counts no more."""
    latest = time.monotonic() + CALL_S
    while is_refused(mallory, "mallory"):
        assert time.monotonic() < latest, "its calls have ended"
        time.sleep(0.01)


def test_who_reads_nothing_leaves_places_to_the_others(crowded: Federation) -> None:
    mallory = narrow(crowded, crowded.joined("mallory"))
    spec = crowded.served.manifest.spec
    wanted = devices.FetchModelRequest(client_id="mallory", manifest_sha256=bytes.fromhex(spec.layout_hash))
    calls = [mallory.FetchModel(wanted) for _ in range(TRIED)]
    check_share(crowded, mallory, calls)
    for call in calls:
        call.cancel()
    check_given_back(mallory)


def silent(over: threading.Event) -> Iterator[devices.PushUpdateRequest]:
    """A push whose header does not come."""
    over.wait(CALL_S)
    yield from ()


def test_who_sends_no_header_leaves_places_to_the_others(crowded: Federation) -> None:
    mallory, over = narrow(crowded, crowded.joined("mallory")), threading.Event()
    calls = [mallory.PushUpdate.future(silent(over)) for _ in range(TRIED)]
    check_share(crowded, mallory, calls)
    over.set()
    until(calls, TRIED)
    check_given_back(mallory)


def opened(crowded: Federation, wallet: Wallet, admin: bool = False) -> grpc.Channel:
    """A connection of a member's own, to the devices' port or the operators'."""
    address = crowded.admin_address if admin else crowded.address
    return crowded.served.keep(secure_channel(address, NARROW, *wallet.credentials()))


def without_request(channel: grpc.Channel, method: str, over: threading.Event) -> Any:
    """A call whose one request does not come until the event."""
    answers: Any = channel.stream_stream(method, request_serializer=bytes)
    return answers(silent(over), timeout=CALL_S)


def watching(channel: grpc.Channel) -> Any:
    """A call that is told how the server is, for as long as it lasts."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(), timeout=CALL_S)


# Calls that come to no handler, or to one that asks no gate: of both ports, and of the devices' alone.
WATCHING = "watching"
OF_BOTH = (
    WATCHING,
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/anabranch.v1.Jobs/ListJobs",
)
OF_DEVICES = ("/anabranch.v1.Devices/Heartbeat", "/anabranch.v1.Devices/FetchModel")


def begun(channel: grpc.Channel, method: str, over: threading.Event) -> Any:
    """Such a call, which lasts until the event."""
    return watching(channel) if method == WATCHING else without_request(channel, method, over)


@pytest.mark.parametrize("method", [*OF_BOTH, *OF_DEVICES])
def test_calls_that_come_to_no_gate_leave_places_to_the_others(crowded: Federation, method: str) -> None:
    channel, over = opened(crowded, crowded.joined("mallory")), threading.Event()
    mallory = DevicesStub(channel)
    calls = [begun(channel, method, over) for _ in range(TRIED)]
    check_share(crowded, mallory, calls)
    for call in calls:
        call.cancel()
    over.set()
    check_given_back(mallory)


@pytest.mark.parametrize(
    ("method", "admin"),
    [*((method, admin) for method in OF_BOTH for admin in (False, True)), (OF_DEVICES[0], False)],
)
def test_a_revoked_member_has_no_call_under_way(crowded: Federation, method: str, admin: bool) -> None:
    wallet = crowded.operator("mallory") if admin else crowded.joined("mallory")
    crowded.authority.revoke("mallory")
    channel, over = opened(crowded, wallet, admin), threading.Event()
    calls = [begun(channel, method, over) for _ in range(4)]
    until(calls, 4)
    over.set()
    assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}


@pytest.mark.parametrize("method", OF_BOTH)
def test_a_device_has_no_call_under_way_on_the_operators_port(crowded: Federation, method: str) -> None:
    channel, over = opened(crowded, crowded.joined("mallory"), admin=True), threading.Event()
    calls = [begun(channel, method, over) for _ in range(TRIED)]
    until(calls, TRIED)
    over.set()
    refused = {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }  # six at a time, by gRPC
    assert {grpc.StatusCode.PERMISSION_DENIED} <= {call.code() for call in calls} <= refused


def test_a_watch_of_health_ends_with_the_certificate(crowded: Federation) -> None:
    watches = [watching(opened(crowded, crowded.joined(name))) for name in ("mallory", "honest")]
    assert [next(calls).status for calls in watches] == [health_pb2.HealthCheckResponse.SERVING] * 2
    crowded.authority.revoke("mallory")
    with pytest.raises(grpc.RpcError, match="is revoked"):
        next(watches[0])
    assert watches[0].code() is grpc.StatusCode.UNAUTHENTICATED
    assert not watches[1].done()


def test_reflection_on_the_operators_port_ends_with_the_certificate(crowded: Federation) -> None:
    over = threading.Event()

    def asked() -> Iterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        over.wait(CALL_S)

    channel = opened(crowded, crowded.operator("mallory"), admin=True)
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    answers = stub.ServerReflectionInfo(asked(), timeout=CALL_S)
    names = {service.name for service in next(answers).list_services_response.service}
    assert "anabranch.v1.Operators" in names
    crowded.authority.revoke("mallory")
    with pytest.raises(grpc.RpcError, match="is revoked"):
        next(answers)
    over.set()


@pytest.mark.parametrize("method", [*OF_BOTH[1:], *OF_DEVICES])
def test_a_request_that_does_not_come_is_not_waited_for_without_end(tmp_path: Path, method: str) -> None:
    with federation(tmp_path, LARGE, replace(LIMITS, upload_idle_s=0.2)) as crowded:
        channel, over = opened(crowded, crowded.joined("mallory")), threading.Event()
        with pytest.raises(grpc.RpcError, match="the request came too slowly and was cut") as cut:
            next(without_request(channel, method, over))
        over.set()
        assert cut.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_call_that_ends_without_its_request_is_told_so(crowded: Federation) -> None:
    over = threading.Event()
    over.set()
    with pytest.raises(grpc.RpcError, match="a call without its request") as refused:
        next(without_request(opened(crowded, crowded.joined("mallory")), OF_DEVICES[0], over))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


class DeafCall:
    """A call of a device whose member reads nothing, not even how the call ends."""

    def __init__(self, wallet: Wallet) -> None:
        self._shown = certificate_pem(wallet.certificate)
        self.told: list[str] = []

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._shown]}

    async def abort(self, code: grpc.StatusCode, *_: object) -> None:
        self.told.append(code.name)
        await asyncio.Event().wait()


def test_who_does_not_read_that_it_is_refused_is_let_go(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.server.places.REFUSAL_S", 0.01)
    call = DeafCall(issued(authority, Kind.DEVICE, "mallory", tmp_path / "mallory"))

    async def answer(*_: object) -> None:
        pytest.fail("the port is for operators")

    async def handler() -> Any:
        return grpc.unary_unary_rpc_method_handler(answer)

    async def called() -> None:
        members = Members(authority)
        placing = TakesPlaces(Gate(members, [Kind.OPERATOR]), None, 1.0)
        details: Any = SimpleNamespace(method=OF_DEVICES[0])
        handled: Any = await placing.intercept_service(lambda _: handler(), details)
        try:
            async with asyncio.timeout(CALL_S):
                await asyncio.gather(handled.stream_unary(None, call), return_exceptions=True)
        finally:
            members.close()

    asyncio.run(called())
    assert call.told == ["PERMISSION_DENIED"]


def test_a_member_has_its_share_of_all_jobs_together(tmp_path: Path) -> None:
    names = ("one", "two")
    for name in names:
        with_job(tmp_path, name)
    identity = {"folder": str(tmp_path / "ca"), "tls": "always"}
    with (
        Authority.create(tmp_path / "ca") as authority,
        Host(tmp_path, LIMITS, identity=identity) as host,
        ExitStack() as stack,
    ):
        for name in names:
            host.until(name, JobState.RUNNING)
        wallet, over = issued(authority, Kind.DEVICE, "mallory", tmp_path / "mallory"), threading.Event()
        channels = [open_channel(f"{host.info.address}/{name}", wallet=wallet) for name in names]
        stubs = [DevicesStub(stack.enter_context(channel)) for channel in channels]
        stack.callback(over.set)
        calls = [stub.PushUpdate.future(silent(over)) for stub in stubs for _ in range(3)]
        until(calls, 2)
        assert all(is_refused(stub, "mallory") for stub in stubs)
