"""The chunks of a model are as large as its device's link takes, for so many devices at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streams import stream
from wire import CALL_S, Served, server_config

from anabranch.client.transfer import IncomingModel
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import Unavailable
from anabranch.core.limits import CHUNK_BYTES, MIB, SLOW_CHUNK_BYTES
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Ask, Capability, Task
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.testing.federation import result_of

SIZE = 4 * MIB + 5 * 4
SMALL = [CHUNK_BYTES] * 16 + [20]
LARGE = [MIB] * 4 + [20]
LITTLE = [SLOW_CHUNK_BYTES] * 256 + [20]
PACE = "anabranch.client.transfer.ANSWERED_BYTES_PER_S"


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    weights = np.arange(SIZE // 4, dtype=np.float32).reshape(-1, 3)
    return write_manifest(tmp_path / "model", "test", {"w": weights})


@pytest.fixture(params=["auto", "calls"])
def served(request: pytest.FixtureRequest, tmp_path: Path, manifest: Manifest) -> Iterator[Served]:
    with Served(server_config(tmp_path / "data", client={"connection": request.param}), manifest) as server:
        yield server


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the chunks that devices get."""
    sizes: list[int] = []
    take = IncomingModel.take

    def taking(self: IncomingModel, offset: int, chunk: bytes | memoryview) -> None:
        sizes.append(len(chunk))
        take(self, offset, chunk)

    monkeypatch.setattr(IncomingModel, "take", taking)
    return sizes


def transport_to(served: Served) -> GrpcTransport:
    assert served.info is not None
    return GrpcTransport(served.info.address, "a")


def request_of(spec: ParamSpec, wished: int) -> devices.FetchModelRequest:
    return devices.FetchModelRequest(
        client_id="a", version=0, manifest_sha256=bytes.fromhex(spec.layout_hash), chunk_bytes_max=wished
    )


def sizes_of(messages: Any) -> list[int]:
    return [len(message.data) for message in messages]


@pytest.mark.parametrize(
    ("wished", "sizes"),
    [
        (0, SMALL),
        (1, LITTLE),
        (100_000, [100_000] * 41 + [94_324]),
        (MIB, LARGE),
        (4 * MIB, LARGE),
        (512 * 1024, [512 * 1024] * 8 + [20]),
    ],
)
def test_chunks_are_as_large_as_is_wished_within_bounds(
    wished: int, sizes: list[int], served: Served
) -> None:
    with transport_to(served) as transport:
        spec = transport.enrol(Capability()).spec
    request = request_of(spec, wished)
    assert sizes_of(DevicesStub(served.channel()).FetchModel(request, timeout=CALL_S)) == sizes
    with stream(served.channel()) as exchange:
        exchange.say(fetch=request)
        answers = [exchange.hear() for _ in sizes]
    assert [len(answer.data) for answer in answers] == sizes


def test_large_ones_are_for_so_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.server.rpc.LARGE_CHUNKS_MAX", 1)
    much = write_manifest(tmp_path / "much", "test", {"w": np.zeros((16 * MIB, 1), np.float32)})
    with Served(server_config(tmp_path / "data"), much) as served:
        with transport_to(served) as transport:
            request = request_of(transport.enrol(Capability()).spec, MIB)
        one, other = (DevicesStub(served.channel()) for _ in range(2))
        begun = one.FetchModel(request, timeout=CALL_S)
        assert len(next(begun).data) == MIB  # nor is the rest read ahead, which is too much
        assert set(sizes_of(other.FetchModel(request, timeout=CALL_S))) == {CHUNK_BYTES}
        begun.cancel()  # in its midst: its place is another's
        latest = time.monotonic() + CALL_S
        while set(sizes_of(other.FetchModel(request, timeout=CALL_S))) != {MIB}:
            assert time.monotonic() < latest


def test_a_device_wishes_for_large_ones_where_the_model_before_came_quickly(
    served: Served, came: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with transport_to(served) as transport:
        spec = transport.enrol(Capability()).spec

        def fetched() -> list[int]:
            came.clear()
            assert transport.fetch(spec.layout_hash, 0).version == 0
            return list(came)

        monkeypatch.setattr(PACE, 0)
        assert [fetched(), fetched()] == [SMALL, LARGE]
        assert not transport.fetch(spec.layout_hash, newer_than=0).modified  # which says nothing of the link
        assert fetched() == LARGE
        monkeypatch.setattr(PACE, 1e18)
        assert [fetched(), fetched()] == [LARGE, SMALL]


def test_the_model_that_comes_with_a_task_has_them_too(
    served: Served, came: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PACE, 0)
    with transport_to(served) as transport:
        spec = transport.enrol(Capability()).spec
        task = transport.ask(Ask("a", "t-0"), spec)
        assert isinstance(task, Task)
        transport.fetch(spec.layout_hash, 0)
        answer = transport.push_and_ask(result_of(task, spec, "u-0", 1.0), Ask("a", "t-1"), spec)
        assert isinstance(answer.next, Task)
        came.clear()
        assert transport.fetch(spec.layout_hash, 1).version == 1
        assert came == LARGE


def test_after_a_failure_they_are_small(
    served: Served, came: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PACE, 0)
    with transport_to(served) as transport:
        spec = transport.enrol(Capability()).spec
        transport.fetch(spec.layout_hash, 0)
        take, cuts = IncomingModel.take, ["cut"]

        def breaking(self: IncomingModel, offset: int, chunk: bytes | memoryview) -> None:
            take(self, offset, chunk)
            if cuts:
                raise Unavailable(cuts.pop())

        monkeypatch.setattr(IncomingModel, "take", breaking)
        came.clear()
        transport.fetch(spec.layout_hash, 0)
        assert came == [MIB, *[CHUNK_BYTES] * 12, 20]


def test_of_a_small_model_they_are_small(
    tmp_path: Path, came: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PACE, 0)
    little = write_manifest(tmp_path / "little", "test", {"w": np.zeros((MIB // 4, 2), np.float32)})
    with Served(server_config(tmp_path / "data"), little) as served, transport_to(served) as transport:
        spec = transport.enrol(Capability()).spec
        for _ in range(2):
            transport.fetch(spec.layout_hash, 0)
        assert came == [CHUNK_BYTES] * 16
