"""Transfers over real connections that break, stall or lead nowhere; and errors as they come back."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from flaky_proxy import FlakyProxy
from http_pages import HttpPages
from live_server import live_server

from anabranch.client.channel import error_of
from anabranch.client.health import check_health
from anabranch.client.stopping import Bell, persist
from anabranch.client.transport import GrpcTransport
from anabranch.client.transports import open_transport
from anabranch.core.errors import (
    ERROR_KEY,
    OUTCOMES,
    RETRY_KEY,
    AnabranchError,
    ConfigError,
    InvalidUpdate,
    NotAuthenticated,
    NotPermitted,
    Overloaded,
    ProtocolError,
    StoreFull,
    Unavailable,
    outcome_of,
)
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import UnitMap
from anabranch.core.model.units import Member, UnitGroup
from anabranch.core.model.updates import Ask, Capability, Task, Verdict
from anabranch.core.rng import stream
from anabranch.testing.federation import config, result_of

T = TypeVar("T")

MIB = 1024 * 1024
PARAMETERS = 3 * MIB + 5  # just over 12 MiB on the wire: 49 chunks
KEPT_BYTES = 1 * MIB  # of what came before a cut; the rest lay in sockets and windows on the way


@dataclass
class Large:
    """A server of a large model, and its address."""

    address: str
    spec: ParamSpec
    weights: np.ndarray

    def task(self, transport: GrpcTransport) -> Task:
        transport.enrol(Capability())
        answer = transport.ask(Ask(transport.client_id, f"t-{transport.client_id}"), self.spec)
        assert isinstance(answer, Task)
        return answer


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Large]:
    """The server that models are fetched from: its version 0 stays."""
    with large_server(tmp_path_factory.mktemp("large")) as found:
        yield found


@pytest.fixture(scope="module")
def receiving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Large]:
    """The server that updates are pushed to."""
    with large_server(tmp_path_factory.mktemp("receiving")) as found:
        yield found


@contextmanager
def large_server(folder: Path) -> Iterator[Large]:
    weights = stream(0, "weights").standard_normal(PARAMETERS).astype(np.float32)
    tensors = {"w": weights}
    with live_server(folder, tensors, config()) as info:
        yield Large(info.address, ParamSpec.of(tensors), weights)


def patiently(call: Callable[[], T]) -> T:
    """As the session would: again and again, with a pause between."""
    return persist(call, Bell(), 0, 0.1, 1.0, lambda _: None)


def most_bytes(size_bytes: int, cuts: list[int]) -> float:
    """What a transfer that starts anew after each cut would need, less what was to be kept."""
    return sum(cuts) + size_bytes * 1.02 - KEPT_BYTES * len(cuts)


@pytest.mark.parametrize("cuts", [[], [8 * MIB], [8 * MIB, 6 * MIB]])
def test_a_download_goes_on_where_it_broke_off(large: Large, cuts: list[int]) -> None:
    with FlakyProxy(large.address, cuts) as proxy, GrpcTransport(proxy.address, "a") as transport:
        fetched = patiently(lambda: transport.fetch(large.spec.layout_hash, 0))
        assert (proxy.connections > 1) == bool(cuts)
        assert proxy.passed_bytes < most_bytes(len(fetched.data), cuts)
    assert np.array_equal(np.frombuffer(fetched.data, np.float32), large.weights)


@pytest.mark.parametrize("cuts", [[], [8 * MIB], [8 * MIB, 6 * MIB]])
def test_an_upload_goes_on_where_it_broke_off(receiving: Large, cuts: list[int]) -> None:
    client_id = f"up-{len(cuts)}"
    with GrpcTransport(receiving.address, client_id) as direct:
        task = receiving.task(direct)
    entry = result_of(task, receiving.spec, f"u-{client_id}", 0.0)
    with FlakyProxy(receiving.address, cuts) as proxy, GrpcTransport(proxy.address, client_id) as transport:
        answer = patiently(lambda: transport.push(entry))
        assert (answer.decision.verdict, answer.duplicate) == (Verdict.PUBLISHED, False)
        assert (proxy.connections > 1) == bool(cuts)
        assert proxy.passed_bytes < most_bytes(len(entry.payload), cuts)
        assert transport.push(entry).duplicate


def test_a_broken_download_is_kept_for_the_next_call(large: Large) -> None:
    cuts = [8 * MIB, *[1000] * 5]
    with FlakyProxy(large.address, cuts) as proxy, GrpcTransport(proxy.address, "a") as transport:
        with pytest.raises(Unavailable):
            transport.fetch(large.spec.layout_hash, 0)  # the later connections bring nothing
        before = proxy.passed_bytes
        fetched = patiently(lambda: transport.fetch(large.spec.layout_hash, 0))
        assert proxy.passed_bytes - before < most_bytes(len(fetched.data), []) - KEPT_BYTES
    assert np.array_equal(np.frombuffer(fetched.data, np.float32), large.weights)


@pytest.mark.parametrize("again", [True, False], ids=["the same part", "another part"])
def test_a_broken_download_of_a_part_is_kept_for_that_part_alone(again: bool, tmp_path: Path) -> None:
    rows = stream(0, "rows").standard_normal((8, 512 * 1024)).astype(np.float32)  # 2 MiB each
    units = UnitGroup("rows", len(rows), (Member("w", 0),))
    spec = ParamSpec.of({"w": rows}, [units])
    settings = config(strategy={"name": "asyncdrop"}, submodel={"name": "random", "drop": 0.25})
    with (
        live_server(tmp_path, {"w": rows}, settings, groups=[units]) as info,
        FlakyProxy(info.address, [8 * MIB, *[1000] * 5]) as proxy,
        GrpcTransport(proxy.address, "a") as transport,
        GrpcTransport(info.address, "a") as direct,
    ):

        def granted(task_id: str) -> UnitMap:
            direct.enrol(Capability())
            answer = direct.ask(Ask("a", task_id), spec)
            assert isinstance(answer, Task)
            assert isinstance(answer.submodel, UnitMap)
            return answer.submodel

        part = granted("t-1")
        with pytest.raises(Unavailable):
            transport.fetch(spec.layout_hash, 0, submodel=part)  # the later connections bring nothing
        before = proxy.passed_bytes
        wanted = part if again else granted("t-2")
        assert (wanted == part) == again
        found = patiently(lambda: transport.fetch(spec.layout_hash, 0, submodel=wanted))
        assert (found.part_only, bytes(found.data)) == (True, rows[list(wanted.kept[0])].tobytes())
        assert (proxy.passed_bytes - before < 0.8 * len(found.data)) == again


def test_a_stream_that_stalls_is_cut(large: Large) -> None:
    with (
        FlakyProxy(large.address, [8 * MIB], silent=True) as proxy,
        GrpcTransport(proxy.address, "a", stall_s=0.3) as transport,
        pytest.raises(Unavailable),
    ):
        transport.fetch(large.spec.layout_hash, 0)


def test_a_damaged_upload_is_refused_and_the_task_stays_open(receiving: Large) -> None:
    with GrpcTransport(receiving.address, "b") as transport:
        task = receiving.task(transport)
        good = result_of(task, receiving.spec, "u-b", 0.0)
        bad = result_of(task, receiving.spec, "u-b", 0.0)
        bad.__dict__["digest"] = "00" * 32
        with pytest.raises(InvalidUpdate):
            transport.push(bad)
        assert transport.push(good).decision.verdict is Verdict.PUBLISHED


def test_nobody_at_the_address_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with GrpcTransport(address, "a") as transport, pytest.raises(Unavailable, match=address):
        transport.enrol(Capability())
    assert not check_health(address)


def test_a_call_at_the_port_of_operators_says_which_port_devices_reach(tmp_path: Path) -> None:
    asked = r"server\.address \(port 7070.*server\.admin_address"
    with (
        live_server(tmp_path, {"w": np.zeros(3, np.float32)}, config()) as info,
        GrpcTransport(info.admin_address, "a") as wrong,
        pytest.raises(ProtocolError, match=asked),
    ):
        wrong.enrol(Capability())


@pytest.mark.parametrize("status", [200, 301, 400, 401, 403, 404, 413, 429, 500, 502, 503, 504])
def test_a_page_in_the_place_of_an_answer_ends_no_device(status: int) -> None:
    """A gateway whose route is away for a moment says 404, a portal 403: the server behind said nothing."""
    with HttpPages(status) as pages, GrpcTransport(pages.address, "a") as transport:
        with pytest.raises(Unavailable) as met:
            transport.enrol(Capability())
        assert met.value.reached
        if status != 200:
            assert f"{pages.address}: HTTP {status}, not of a server: a proxy" in str(met.value)


def test_a_closed_transport_is_unavailable(large: Large) -> None:
    transport = GrpcTransport(large.address, "a")
    transport.close()
    with pytest.raises(Unavailable):
        transport.enrol(Capability())


def test_health_is_asked_by_the_standard_protocol(large: Large) -> None:
    assert check_health(large.address)
    assert not check_health(large.address, "a service that is not there")


# --- errors --------------------------------------------------------------------------------------


class Failed(grpc.RpcError):
    """A failed call, as gRPC raises it."""

    def __init__(self, status: str, metadata: list[tuple[str, str]] | None = None) -> None:
        super().__init__()
        self._status, self._metadata = status, metadata

    def code(self) -> Any:
        return grpc.StatusCode[self._status]

    def details(self) -> str:
        return "what the server said"

    def trailing_metadata(self) -> Any:
        return self._metadata


@pytest.mark.parametrize("cls", OUTCOMES, ids=lambda cls: cls.__name__)
def test_every_error_of_the_tree_survives_the_journey(cls: type[AnabranchError]) -> None:
    error = error_of(Failed(OUTCOMES[cls].grpc_status, [(ERROR_KEY, cls.__name__)]), "here:1")
    assert type(error) is cls
    assert str(error) == "what the server said"


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        ("UNAVAILABLE", Unavailable),
        ("DEADLINE_EXCEEDED", Unavailable),
        ("ABORTED", Unavailable),
        ("INTERNAL", Unavailable),
        ("RESOURCE_EXHAUSTED", Overloaded),
        ("INVALID_ARGUMENT", InvalidUpdate),
        ("FAILED_PRECONDITION", ProtocolError),
        ("UNAUTHENTICATED", NotAuthenticated),
        ("PERMISSION_DENIED", NotPermitted),
        ("UNIMPLEMENTED", ProtocolError),
    ],
)
def test_a_bare_status_says_where_it_is_from(status: str, cls: type[AnabranchError]) -> None:
    error = error_of(Failed(status), "here:1")
    assert type(error) is cls
    assert "here:1" in str(error)
    assert outcome_of(error).retryable == (cls in (Unavailable, Overloaded))


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("0.5,2", (0.5, 2.0)),
        ("3,1", (1.0, 5.0)),
        ("-1,1", (1.0, 5.0)),
        ("nan,1", (1.0, 5.0)),
        ("1,inf", (1.0, 5.0)),
        ("", (1.0, 5.0)),
        ("soon", (1.0, 5.0)),
    ],
)
def test_the_retry_window_is_read_if_it_makes_sense(text: str, window: tuple[float, float]) -> None:
    failed = Failed("RESOURCE_EXHAUSTED", [(ERROR_KEY, "Overloaded"), (RETRY_KEY, text)])
    error = error_of(failed, "here:1")
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == window


def test_a_full_store_is_not_an_overload_and_says_when_to_come_too() -> None:
    error = error_of(Failed("RESOURCE_EXHAUSTED", [(ERROR_KEY, "StoreFull"), (RETRY_KEY, "1,2")]), "here:1")
    assert (type(error), error.retry_after_s) == (StoreFull, (1.0, 2.0))
    assert error_of(Failed("UNAVAILABLE"), "here:1").retry_after_s is None


@pytest.mark.parametrize("name", ["http", "https", "grpc"])
def test_a_scheme_before_an_address_is_no_name_of_a_transport(name: str) -> None:
    with pytest.raises(ConfigError, match=f"write HOST:PORT without {name}://, fed.example:7070"):
        open_transport(f"{name}://fed.example:7070/", "a", None)
