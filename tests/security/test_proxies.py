"""A device that reaches its server through the proxy of its environment alone, from the joining on."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from connect_proxy import ConnectProxy
from guarded import federation
from ports import free_port

from anabranch.client.joining import join
from anabranch.client.operator import OperatorClient
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import Unavailable
from anabranch.core.model.updates import Capability
from anabranch.identity.authority import DAY_S
from anabranch.support.proxies import Proxy, connected, proxy_to

TOKEN = f"{'0' * 16}.{'x' * 43}"
HOST = "federation.invalid"  # which the proxy alone knows


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectProxy]:
    with ConnectProxy() as proxy:
        monkeypatch.setenv("https_proxy", f"http://{proxy.address}")
        yield proxy


def seen_from_afar(address: str) -> str:
    return f"{HOST}:{address.rpartition(':')[2]}"


def test_a_device_joins_and_enrols_through_it(tmp_path: Path, proxy: ConnectProxy) -> None:
    with federation(tmp_path) as guarded:
        where = seen_from_afar(guarded.join_address)
        token = guarded.authority.invite("gw-1", DAY_S)
        wallet = join(tmp_path / "papers", where, token, guarded.authority.sha256)
        assert len(proxy.asked) == 3, "to look at the certificate, at the authority's, and to join"
        assert {asked.split("\r\n")[0] for asked in proxy.asked} == {f"CONNECT {where} HTTP/1.1"}
        with GrpcTransport(seen_from_afar(guarded.address), wallet.name, wallet=wallet) as device:
            assert device.enrol(Capability()).run
        assert len(proxy.asked) > 3


def test_to_this_machine_none_leads(tmp_path: Path, proxy: ConnectProxy) -> None:
    with federation(tmp_path) as guarded:
        wallet = guarded.joined("gw-1")
        with guarded.transport(wallet) as device:
            assert device.enrol(Capability()).run
    assert proxy.asked == []


def test_one_that_refuses_is_named(tmp_path: Path, proxy: ConnectProxy) -> None:
    proxy.status = "403 Forbidden"
    named = rf"the proxy {proxy.address} \(https_proxy\)"
    with pytest.raises(Unavailable, match=rf"{named} does not pass {HOST}:7072 on: HTTP/1.1 403 Forbidden"):
        join(tmp_path / "papers", f"{HOST}:7072", TOKEN, "0" * 64)
    with OperatorClient(f"{HOST}:7071") as operator, pytest.raises(Unavailable, match=f"through {named}"):
        operator.status()


def test_one_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
    named = rf"the proxy 127.0.0.1:{port} \(http_proxy\)"
    with pytest.raises(Unavailable, match=named):
        join(tmp_path / "papers", f"{HOST}:7072", TOKEN, "0" * 64)
    with OperatorClient(f"{HOST}:7071") as operator, pytest.raises(Unavailable, match=f"through {named}"):
        operator.status()


def test_a_name_server_that_is_silent_is_waited_for_no_longer_than_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    heard: list[bool] = []

    def looked_up(*_: object, **__: object) -> list[object]:
        heard.append(over.wait(60))
        return []

    monkeypatch.setattr("socket.getaddrinfo", looked_up)
    with pytest.raises(TimeoutError, match=f"no name server says where {HOST} is"):
        connected(HOST, 7072, time.monotonic() + 0.1)
    assert heard == [], "it has not answered yet"
    over.set()


def test_an_address_that_is_silent_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a name has an IPv6 address, and packets to it are dropped."""
    looked_up = socket.getaddrinfo

    def of_two(host: str, port: int, *kind: Any, **named: Any) -> list[Any]:
        hosts = ("127.0.0.2", "127.0.0.1") if host == HOST else (host,)
        return [found for each in hosts for found in looked_up(each, port, *kind, **named)]

    with socket.create_server(("127.0.0.1", 0)) as there, ExitStack() as full:
        port = there.getsockname()[1]
        full.enter_context(socket.create_server(("127.0.0.2", port), backlog=0))
        for _ in range(4):  # there is no room for more
            waiting = full.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.2", port))
        monkeypatch.setattr("socket.getaddrinfo", of_two)
        with connected(HOST, port, time.monotonic() + 6.0) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)


def test_an_address_of_the_link_is_asked_for_with_its_zone() -> None:
    with pytest.raises(OSError, match=r".") as found:  # nobody has it
        connected("fe80::1%lo", 7072, time.monotonic() + 5.0)
    assert found.value.errno != errno.EINVAL


def test_who_it_asks_for_is_told_with_its_password(
    proxy: ConnectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.status = "407 Proxy Authentication Required"
    monkeypatch.setenv("https_proxy", f"http://me:a%40b@{proxy.address}")
    with pytest.raises(Unavailable, match="407 Proxy Authentication Required") as met:
        join(Path(), f"{HOST}:7072", TOKEN, "0" * 64)
    assert "Proxy-Authorization: Basic bWU6YUBi\r\n" in proxy.asked[0]  # me:a@b
    assert "a@b" not in str(met.value)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"http_proxy": "http://p:1"}, Proxy("p", 1, "http_proxy")),
        ({"http_proxy": "http://p"}, Proxy("p", 80, "http_proxy")),
        ({"http_proxy": "http://p:1", "https_proxy": "http://q:2"}, Proxy("q", 2, "https_proxy")),
        ({"https_proxy": "http://q:2", "grpc_proxy": ""}, None),
        ({"http_proxy": "https://p:1"}, None),
        ({"http_proxy": "p:1"}, None),
        ({"http_proxy": "http://p:x"}, None),
        ({"http_proxy": "http://[::2]:1"}, Proxy("::2", 1, "http_proxy")),
        ({"http_proxy": "http://p:1", "no_proxy": "other.invalid, .INVALID"}, None),
        ({"http_proxy": "http://p:1", "no_proxy": "other.invalid"}, Proxy("p", 1, "http_proxy")),
        (
            {"http_proxy": "http://p:1", "no_proxy": HOST, "no_grpc_proxy": "other"},
            Proxy("p", 1, "http_proxy"),
        ),
    ],
)
def test_the_rules_are_those_of_grpc(
    variables: dict[str, str], found: Proxy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_to(HOST) == found


def test_networks_are_excepted_and_so_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://p:1")
    monkeypatch.setenv("no_proxy", "10.1.0.0/16,fd00::/8")
    hosts = ["10.1.2.3", "10.2.2.3", "fd00::1", "fe00::1", "127.0.0.1", "::1", "localhost"]
    assert [proxy_to(host) is not None for host in hosts] == [False, True, False, True, False, False, False]
