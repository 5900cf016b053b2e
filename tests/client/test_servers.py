"""Several servers of which one serves: where calls go, and how a device finds back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from federations import config, first_weights
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from live_server import live_server
from ports import free_port

from anabranch.client.link import Link
from anabranch.client.run import ClientOptions, run_client
from anabranch.client.servers import Servers
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import ConfigError, Unavailable
from anabranch.core.model.updates import Capability
from anabranch.identity.addresses import parse_addresses
from anabranch.protos.v1 import devices_pb2 as devices

BACK_S = 600.0
RETRY_S = 6000.0  # a test that waits for a backing off to end does not end


@contextmanager
def standby(port: int = 0) -> Iterator[str]:
    """A server that is there and does not serve."""
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    yield f"127.0.0.1:{bound}"
    server.stop(0).wait()


def test_a_call_goes_to_the_server_that_serves(tmp_path: Path) -> None:
    returned = threading.Event()
    gone = f"127.0.0.1:{free_port()}"
    with (
        standby() as idle,
        live_server(tmp_path, first_weights(), config()) as info,
        GrpcTransport(f"{gone}, {idle}, {info.address}", "a") as transport,
    ):
        transport.on_return(returned.set)
        with pytest.raises(Unavailable):
            transport.enrol(Capability())
        assert returned.wait(BACK_S)
        assert transport.address == info.address
        assert transport.enrol(Capability()).run == "test"


def test_a_server_that_served_all_along_calls_for_no_hurry(tmp_path: Path) -> None:
    returned = threading.Event()
    with live_server(tmp_path, first_weights(), config()) as info:
        servers = Servers(info.address, grpc.insecure_channel)
        servers.returned = returned.set
        before = servers.current
        servers.failed(before)
        assert servers._lookout is not None
        servers._lookout.join(BACK_S)
        assert servers.current is before
        assert not returned.is_set()
        servers.close()


def test_a_lookout_ends_when_a_call_is_answered_and_cuts_nothing() -> None:
    """Over a long link no look of its hears a server that calls reach."""
    returned = threading.Event()
    with standby() as address:
        servers = Servers(address, grpc.insecure_channel)
        servers.returned = returned.set
        before = servers.current
        servers.failed(before)
        assert servers._lookout is not None
        servers.answered(before)
        servers._lookout.join(BACK_S)
        assert not servers._lookout.is_alive()
        assert servers.current is before
        servers.close()


def test_a_link_that_takes_long_to_connect_gets_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.client.link.CONNECT_S", 0.2)
    took_s: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:  # TCP connects, and nothing is said
        link = Link(f"127.0.0.1:{silent.getsockname()[1]}")
        for _ in range(3):
            began_at = time.monotonic()
            with pytest.raises(Unavailable), link.calling():
                link.stub().Enrol(devices.EnrolRequest(), timeout=BACK_S)
            took_s.append(time.monotonic() - began_at)
        link.close()
    assert took_s[1] >= 0.4
    assert took_s[2] >= 0.8


def test_a_machine_that_says_nothing_is_left_after_one_call(tmp_path: Path) -> None:
    returned = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            live_server(tmp_path, first_weights(), config()) as info,
            GrpcTransport(f"{mute}, {info.address}", "a") as transport,
        ):
            transport.on_return(returned.set)
            with pytest.raises(Unavailable):
                transport.enrol(Capability())
            assert returned.wait(BACK_S), "no other call is made meanwhile, so the first has to begin to look"
            assert transport.address == info.address


def test_a_lookout_ends_with_the_transport() -> None:
    servers = Servers(f"127.0.0.1:{free_port()}", grpc.insecure_channel)
    servers.failed(servers.current)
    servers.close()
    assert servers._lookout is not None
    servers._lookout.join(BACK_S)
    assert not servers._lookout.is_alive()
    servers.failed(servers.current)  # and none begins after it


@pytest.mark.parametrize("text", ["", "host", "a:1,", "a:1,b", ":7070", "a:x"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_addresses(text)
    assert parse_addresses("a:1, [::1]:2") == ["a:1", "[::1]:2"]


@pytest.mark.parametrize("push", ["task", "overlap"])
def test_a_device_goes_on_when_its_server_is_back_however_long_it_backs_off(
    push: str, tmp_path: Path
) -> None:
    settings = config(client={"push": push}, server={"tasks_per_client": 2})
    port = free_port()
    told: list[str] = []
    options = ClientOptions(
        "synthetic",
        f"127.0.0.1:{port}",
        "a",
        state_dir=tmp_path / "a",
        tasks_max=20,
        step_time_s=0.05,
        retry_base_s=RETRY_S,
        retry_cap_s=RETRY_S,
    )
    done, gone = threading.Event(), threading.Event()

    def hear(kind: str, **data: Any) -> None:
        told.append(kind)
        if kind == "pushed":  # nothing more is called until there is nobody to answer
            assert gone.wait(BACK_S)

    def run() -> None:
        run_client(options, hear)
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    await_kind(told, "failed")  # nobody is there yet
    with live_server(tmp_path, first_weights(), settings, port=port):
        await_kind(told, "pushed")
        seen = len(told)
    gone.set()
    await_kind(told, "failed", seen)
    with live_server(tmp_path, first_weights(), settings, port=port):
        assert done.wait(BACK_S)
    thread.join()


def await_kind(told: list[str], kind: str, after: int = 0) -> None:
    deadline = time.monotonic() + BACK_S
    while kind not in told[after:]:
        assert time.monotonic() < deadline, told
        time.sleep(0.01)
