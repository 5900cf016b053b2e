"""One member has its share of the calls that a server has under way, and no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from guarded import Federation, federation, issued
from job_hosts import Host, with_job
from wire import CALL_S

from anabranch.client.channel import open_channel, secure_channel
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.params import Tensors
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import Kind
from anabranch.identity.wallet import Wallet
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub
from anabranch.server.job import JobState

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
