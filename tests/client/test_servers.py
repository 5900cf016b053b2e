"""Several servers of which one serves: where calls go, and how a device finds back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from live_server import live_server
from ports import free_port

from anabranch.client.channel import CONNECT_S, CONNECT_S_MAX
from anabranch.client.health import SERVING, asked_health
from anabranch.client.link import Link
from anabranch.client.run import ClientOptions, run_client
from anabranch.client.servers import LOOKOUT, Servers, pause_after
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import ConfigError, Unavailable
from anabranch.core.model.updates import Capability
from anabranch.identity.addresses import parse_addresses
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.testing.federation import config, first_weights

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


class Asked:
    """Servers `current` and `other`, whose answers to a lookout are given by hand: see `of`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.channels: list[grpc.Channel] = []
        self._answers: list[Future[bytes]] = []
        self._told = threading.Event()
        monkeypatch.setattr("anabranch.client.servers.asked_health", self._ask)
        self.servers = Servers("127.0.0.1:1,127.0.0.1:2", self._connect)
        self.servers.returned = self._told.set
        self.before = self.servers.current

    def of(self, place: int) -> Future[bytes]:
        """The answer of the current server (0) or of the other (1), once it is asked."""
        await_true(lambda: len(self._answers) > place)
        return self._answers[place]

    def returned(self) -> bool:
        """Whether that was told, when the lookout is over."""
        await_lookouts()
        return self._told.is_set()

    def _connect(self, address: str) -> grpc.Channel:
        self.channels.append(grpc.insecure_channel(address))
        return self.channels[-1]

    def _ask(self, channel: grpc.Channel, look_s: float) -> Future[bytes]:
        self._answers.append(Future())
        return self._answers[-1]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    made = Asked(monkeypatch)
    yield made
    made.servers.close()


def await_true(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BACK_S
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def await_lookouts() -> None:
    for thread in threading.enumerate():
        if thread.name == LOOKOUT:
            thread.join(BACK_S)
            assert not thread.is_alive()


def test_looks_grow_rarer_and_a_short_restart_is_seen_soon() -> None:
    """Refused at once, as of a server that restarts under a fleet of thousands."""
    looks, devices = 0, 500
    for _ in range(devices):
        at_s = 0.0
        while at_s < 65.0:
            looks += at_s > 5.0
            pause_s = pause_after(at_s)
            assert at_s > 5.0 or pause_s <= 2.0
            at_s += pause_s
    assert looks <= 12 * devices
    assert {pause_after(86_400.0) <= 20.0 for _ in range(devices)} == {True}
    assert pause_after(86_400.0) != pause_after(86_400.0), "all would come at a time"


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
        await_lookouts()
        assert servers.current is before
        assert not returned.is_set()
        servers.close()


def test_a_lookout_ends_when_a_call_is_answered() -> None:
    """Over a long link no look of its hears a server that calls reach."""
    returned = threading.Event()
    with standby() as address:
        link = Link(address)
        link.servers.returned = returned.set
        before = link.servers.current
        with pytest.raises(Unavailable), link.calling():
            raise Unavailable("lost")
        with link.calling():
            pass
        assert returned.wait(BACK_S)
        assert link.servers.current is before
        link.close()


def test_an_answer_is_not_cut_by_a_server_that_says_that_it_serves(asked: Asked) -> None:
    servers = asked.servers
    with servers._changed:  # the lookout hears of both at once
        servers.failed(asked.before)
        asked.of(1).set_result(SERVING)
        servers.answered(asked.before)
    assert asked.returned()
    assert servers.current is asked.before
    with pytest.raises(ValueError, match="closed"):  # and the other's connection is not kept
        asked_health(asked.channels[2], BACK_S)


def test_an_answer_of_before_a_failure_ends_no_lookout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.client.servers.PAUSE_S", 0.001)
    returned = threading.Event()
    opened: list[str] = []

    def connect(address: str) -> grpc.Channel:
        opened.append(address)
        return grpc.insecure_channel(address)

    with standby() as address:
        servers = Servers(address, connect)
        servers.returned = returned.set
        with servers._changed:  # the lookout sees what comes of all three
            servers.failed(servers.current)
            servers.answered(servers.current)
            servers.failed(servers.current)
        await_true(lambda: len(opened) > 4 or returned.is_set())
        assert not returned.is_set(), "nobody serves"
        servers.close()


def test_who_says_that_it_serves_is_taken_though_another_says_nothing(asked: Asked) -> None:
    asked.servers.failed(asked.before)
    asked.of(1).set_result(SERVING)
    assert asked.returned()
    assert asked.servers.current.address == asked.servers.addresses[1]


def test_the_current_server_stays_when_it_serves_as_well(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.client.servers.AHEAD_S", BACK_S)
    asked.servers.failed(asked.before)
    asked.of(1).set_result(SERVING)
    time.sleep(0.1)  # a lookout that does not wait would be over
    asked.of(0).set_result(SERVING)
    assert not asked.returned()
    assert asked.servers.current is asked.before


def test_looks_end_with_the_transport(asked: Asked) -> None:
    asked.servers.failed(asked.before)
    asked.of(1)
    time.sleep(0.1)  # so that it waits, and has to be woken
    asked.servers.close()
    assert not asked.returned()
    assert len(asked.channels) == 3
    for channel in asked.channels:
        with pytest.raises(ValueError, match="closed"):
            asked_health(channel, BACK_S)


class Allowed:
    """A link by a clock of the test's, and the time to connect that its channels are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s, self._given_s = 0.0, CONNECT_S
        clock = SimpleNamespace(monotonic=lambda: self._now_s, time=time.time)
        monkeypatch.setattr("anabranch.client.link.time", clock)
        monkeypatch.setattr("anabranch.client.link.open_channel", self._open)
        self.link = Link("127.0.0.1:1")
        monkeypatch.setattr(
            self.link.servers, "failed", lambda server: None
        )  # whose looks have channels, too

    def _open(self, address: str, *settings: Any, connect_s: float) -> grpc.Channel:
        self._given_s = connect_s
        return grpc.insecure_channel(address)

    def after(self, call_s: float, answered: bool) -> float:
        """What a new channel is given after a call that took so long."""
        try:
            with self.link.calling():
                self._now_s += call_s
                if not answered:
                    error = Unavailable("nobody answers")
                    error.reached = False
                    raise error
        except Unavailable:
            pass
        self.link.servers.reconnect()
        return self._given_s


def test_the_time_to_connect_has_a_bound_and_comes_down_with_the_round_trip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed = Allowed(monkeypatch)
    for _ in range(6):
        longest_s = allowed.after(17.0, answered=False)
    assert longest_s == CONNECT_S_MAX
    assert allowed.after(4.0, answered=True) == CONNECT_S_MAX  # a round trip of 4 s: TLS takes three
    assert allowed.after(3.0, answered=True) == 12.0
    assert allowed.after(12.5, answered=False) == CONNECT_S_MAX
    assert allowed.after(1.0, answered=True) == 4.0
    assert allowed.after(9.0, answered=True) == 4.0  # a large model says nothing of the link
    assert allowed.after(0.05, answered=True) == CONNECT_S
    assert allowed.after(1.9, answered=False) == CONNECT_S
    assert allowed.after(2.1, answered=False) == 2 * CONNECT_S
    allowed.link.close()


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
    await_lookouts()
    servers.failed(servers.current)  # and none begins after it
    assert servers._lookout is None


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
