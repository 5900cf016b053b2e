"""By which door a device's requests go, and how it goes on by the other."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from flaky_proxy import FlakyProxy
from streams import stream
from wire import CALL_S, CHUNK, Served, server_config

from anabranch.client.calls import CallDoor, Door
from anabranch.client.exchange import StreamDoor
from anabranch.client.stopping import Bell, persist
from anabranch.client.transfer import LinkPace, chunks_of, update_header
from anabranch.client.transport import GrpcTransport
from anabranch.core.effects import Refused
from anabranch.core.errors import InvalidUpdate, ProtocolError, Unavailable, UnknownTask
from anabranch.core.limits import CHUNK_BYTES, DEFAULT_LIMITS, MIB
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Ask, Capability, Task
from anabranch.server.exchange import DevicesAndExchange
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.streams import OpenStream
from anabranch.server.uploads import Upload
from anabranch.testing.federation import result_of

VALUES = 100_000
UPDATES = 8
KIB = 1024


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", {"w": np.zeros((VALUES // 100, 100), np.float32)})


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the streams that devices open, and the requests over them."""
    count: Counter[str] = Counter()
    begin, answer = StreamDoor.__init__, DevicesAndExchange._answer

    def beginning(self: StreamDoor, *more: Any) -> None:
        count["streams"] += 1
        begin(self, *more)

    async def answering(self: DevicesAndExchange, request: Any, *more: Any) -> None:
        count[request.head.WhichOneof("request")] += 1
        await answer(self, request, *more)

    monkeypatch.setattr(StreamDoor, "__init__", beginning)
    monkeypatch.setattr(DevicesAndExchange, "_answer", answering)
    return count


@pytest.fixture
def served(tmp_path: Path, manifest: Manifest, opened: Counter[str]) -> Iterator[Served]:
    assert not opened
    config = server_config(tmp_path / "data", client={"connection": "auto"})
    with Served(config, manifest) as server:
        yield server


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has no such method, as those of before it."""

    async def unknown(self: DevicesAndExchange, requests: Any, context: Any) -> None:
        del self, requests
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    monkeypatch.setattr(DevicesAndExchange, "Exchange", unknown)


def address(served: Served) -> str:
    assert served.info is not None
    return served.info.address


def granted(transport: GrpcTransport, spec: ParamSpec, task_id: str) -> Task:
    answer = transport.ask(Ask(transport.client_id, task_id), spec)
    assert isinstance(answer, Task)
    return answer


def insist(call: Any) -> Any:
    """What a call brings in the end."""
    return persist(call, Bell(), 0, 0.05, 0.2, lambda _: None)


def test_the_run_says_by_which_door(served: Served, opened: Counter[str]) -> None:
    with GrpcTransport(address(served), "a") as transport:
        spec = transport.enrol(Capability()).spec
        first = transport.push_and_ask(
            result_of(granted(transport, spec, "t-1"), spec, "u-1", 1.0), Ask("a", "t-2"), spec
        )
        assert isinstance(first.next, Task)
        transport.fetch(spec.layout_hash, 1)
        transport.heartbeat("t-2", 1.0)
        transport.drop("t-2", "enough")
        assert transport.query_upload("u-1").answer is not None
    assert opened == {
        "streams": 1,
        "ask": 1,
        "push": 1,
        "fetch": 1,
        "heartbeat": 1,
        "drop": 1,
        "query": 1,
    }


def test_calls_are_made_where_the_run_wants_them(
    tmp_path: Path, manifest: Manifest, opened: Counter[str]
) -> None:
    config = server_config(tmp_path / "data", client={"connection": "calls"})
    with Served(config, manifest) as served, GrpcTransport(address(served), "a") as transport:
        spec = transport.enrol(Capability()).spec
        transport.push(result_of(granted(transport, spec, "t-1"), spec, "u-1", 1.0))
    assert not opened


def test_who_has_not_enrolled_makes_calls(served: Served, opened: Counter[str]) -> None:
    with GrpcTransport(address(served), "observer") as transport:
        assert transport.fetch(served.manifest.spec.layout_hash).version == 0
    assert not opened


@pytest.mark.usefixtures("older")
def test_a_server_of_before_gets_calls(served: Served, opened: Counter[str]) -> None:
    with GrpcTransport(address(served), "a") as transport:
        spec = transport.enrol(Capability()).spec
        for n in range(3):
            transport.push(result_of(granted(transport, spec, f"t-{n}"), spec, f"u-{n}", 1.0))
    assert opened == {"streams": 1}, "once it was tried"
    assert (served.model() == 3.0).all()


@pytest.fixture
def babbling(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server says on a stream is no message."""

    async def babble(self: DevicesAndExchange, requests: Any, context: Any) -> None:
        del self, requests
        await context.read()
        await context.write(b"\xff")

    monkeypatch.setattr(DevicesAndExchange, "Exchange", babble)


@pytest.mark.usefixtures("babbling")
def test_a_server_that_babbles_gets_calls(served: Served) -> None:
    with GrpcTransport(address(served), "a") as transport:
        spec = transport.enrol(Capability()).spec
        assert granted(transport, spec, "t-1").task_id == "t-1"
    with GrpcTransport(address(served), "b", connection="stream") as transport:
        spec = transport.enrol(Capability()).spec
        with pytest.raises(Unavailable, match="the first answer was none"):
            transport.ask(Ask("b", "t-1"), spec)


@pytest.mark.usefixtures("older")
def test_who_wants_the_stream_alone_is_told_that_there_is_none(served: Served) -> None:
    with GrpcTransport(address(served), "a", connection="stream") as transport:
        spec = transport.enrol(Capability()).spec
        with pytest.raises(ProtocolError, match=r"does not know this call.*of another release"):
            transport.ask(Ask("a", "t-1"), spec)


def test_an_error_is_the_one_of_the_call_and_the_device_goes_on(served: Served, opened: Counter[str]) -> None:
    with GrpcTransport(address(served), "a") as transport:
        spec = transport.enrol(Capability()).spec
        task = granted(transport, spec, "t-1")
        other = result_of(task, spec, "u-0", 1.0, task_id="t-0")
        with pytest.raises(UnknownTask):
            transport.push(other)
        with pytest.raises(InvalidUpdate, match="not finite"):
            transport.push(result_of(task, spec, "u-1", float("nan")))
        transport.push(result_of(granted(transport, spec, "t-2"), spec, "u-2", 1.0))
    assert opened["streams"] == 3
    assert opened["push"] == 3


def test_models_come_with_their_tasks_from_the_second_on(served: Served, opened: Counter[str]) -> None:
    with GrpcTransport(address(served), "a") as transport:
        spec = transport.enrol(Capability()).spec
        task: Task | Refused | None = granted(transport, spec, "t-0")
        for n in range(UPDATES):
            assert isinstance(task, Task)
            model = transport.fetch(spec.layout_hash, task.base_version, holds=n - 1 if n else None)
            assert (model.version, set(np.frombuffer(model.data, np.float32))) == (n, {float(n)})
            ask = Ask("a", f"t-{n + 1}", holds_version=n)
            task = transport.push_and_ask(result_of(task, spec, f"u-{n}", 1.0), ask, spec).next
    assert opened == {"streams": 1, "ask": 1, "fetch": 1, "push": UPDATES}


def test_what_is_there_of_a_fresh_task_is_sent_again(served: Served, opened: Counter[str]) -> None:
    """As where a folder was copied: nobody asks how much of the update is there."""
    with GrpcTransport(address(served), "a") as one, GrpcTransport(address(served), "a") as other:
        spec = one.enrol(Capability()).spec
        other.enrol(Capability())
        entry = result_of(granted(one, spec, "t-1"), spec, "u-1", 1.0)
        with stream(served.channel()) as cut:
            first = next(chunks_of(entry.payload, 0, CHUNK))
            cut.say(first.data, push=update_header(entry, "a"), more=True)
            cut.end()  # what came of it is there at once
            assert cut.over()[0] != "OK"
        assert insist(lambda: one.query_upload("u-1")).received_bytes == len(first.data)
        assert isinstance(granted(other, spec, "t-1"), Task)
        opened.clear()
        assert other.push(entry).version == 1
        assert opened == {"push": 1}
    assert (served.model() == 1.0).all()


@pytest.mark.parametrize("other", ["heartbeat", "another version", "what it holds", "drop"])
def test_who_asks_for_something_else_gets_it(other: str, served: Served, opened: Counter[str]) -> None:
    """Though the model of the task is on its way: another stream carries on."""
    with GrpcTransport(address(served), "a") as transport:
        spec = transport.enrol(Capability()).spec
        first = granted(transport, spec, "t-0")
        transport.fetch(spec.layout_hash, 0)
        pushed = transport.push_and_ask(result_of(first, spec, "u-0", 1.0), Ask("a", "t-1"), spec)
        assert isinstance(pushed.next, Task)
        if other == "heartbeat":
            assert transport.heartbeat("t-1", 1.0).version == 1
        elif other == "another version":
            assert transport.fetch(spec.layout_hash, 0).version == 0
        elif other == "what it holds":
            assert transport.fetch(spec.layout_hash, 1, holds=0).version == 1
        else:
            transport.drop("t-1", "enough")
        model = transport.fetch(spec.layout_hash, 1)
        assert (np.frombuffer(model.data, np.float32) == 1.0).all()
        assert isinstance(granted(transport, spec, "t-2"), Task)
    assert opened["streams"] == 2


@pytest.mark.parametrize("connection", ["auto", "calls"])
@pytest.mark.parametrize("most", [{}, {"message_bytes_max": MIB}], ids=["smaller chunks", "smaller messages"])
def test_a_server_that_takes_smaller_chunks_by_now_gets_them(
    connection: str, most: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older release, or one with other caps, has taken the place of the one that it enrolled with."""
    monkeypatch.setattr("anabranch.client.transfer.QUICK_BYTES_PER_S", 0)
    manifest = write_manifest(tmp_path / "model", "test", {"w": np.zeros(10 * MIB // 4, np.float32)})
    limits = replace(DEFAULT_LIMITS, chunk_bytes_max=CHUNK_BYTES, **most)
    config = server_config(tmp_path / "data", client={"connection": connection})
    with Served(config, manifest, limits) as served, GrpcTransport(address(served), "a") as transport:
        spec = transport.enrol(Capability()).spec
        transport._limits = replace(transport._limits, chunk_bytes_max=MIB)
        for version in (1, 2):
            task = granted(transport, spec, f"t-{version}")
            assert transport.push(result_of(task, spec, f"u-{version}", 1.0)).version == version
        assert (served.model() == 2.0).all()


@pytest.mark.parametrize("connection", ["auto", "calls"])
def test_an_update_goes_out_whole_where_the_one_before_was_taken_quickly(
    connection: str, tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    add = Upload.add

    async def adding(self: Upload, offset: int, chunk: bytes | memoryview) -> None:
        taken.append(len(chunk))
        await add(self, offset, chunk)

    monkeypatch.setattr(Upload, "add", adding)
    config = server_config(tmp_path / "data", client={"connection": connection})
    with Served(config, manifest) as served, GrpcTransport(address(served), "a") as transport:
        spec = transport.enrol(Capability()).spec

        def chunks(n: int, damaged: bool = False) -> list[int]:
            entry = result_of(granted(transport, spec, f"t-{n}"), spec, f"u-{n}", 1.0)
            taken.clear()
            if damaged:
                broken = replace(entry, payload=bytes(len(entry.payload)))
                object.__setattr__(broken, "digest", entry.digest)
                with pytest.raises(InvalidUpdate):
                    transport.push(broken)
            else:
                transport.push(entry)
            return list(taken)

        whole, small = [4 * VALUES], [CHUNK_BYTES, 4 * VALUES - CHUNK_BYTES]
        monkeypatch.setattr("anabranch.client.transfer.ANSWERED_BYTES_PER_S", 0)
        assert [chunks(1), chunks(2), chunks(3, damaged=True), chunks(4)] == [small, whole, whole, small]
        monkeypatch.setattr("anabranch.client.transfer.ANSWERED_BYTES_PER_S", 1e18)
        assert [chunks(5), chunks(6)] == [whole, small]


def test_a_whole_update_that_is_too_large_a_chunk_by_now_is_sent_in_smaller_ones(
    tmp_path: Path, manifest: Manifest
) -> None:
    limits = replace(DEFAULT_LIMITS, chunk_bytes_max=CHUNK_BYTES)
    config = server_config(tmp_path / "data")
    with Served(config, manifest, limits) as served, GrpcTransport(address(served), "a") as transport:
        spec = transport.enrol(Capability()).spec
        transport._limits, transport._sends = replace(transport._limits, chunk_bytes_max=MIB), LinkPace.QUICK
        assert transport.push(result_of(granted(transport, spec, "t"), spec, "u", 1.0)).version == 1
    assert transport._limits.chunk_bytes_max == CHUNK_BYTES


def test_what_is_asked_beside_a_transfer_is_a_call(served: Served) -> None:
    doors: list[Door] = []
    with GrpcTransport(address(served), "a") as transport:
        transport.enrol(Capability())

        def beside(door: Door) -> None:
            doors.append(door)
            thread = threading.Thread(target=lambda: transport._doors.ask(doors.append))
            thread.start()
            thread.join(CALL_S)

        transport._doors.ask(beside)
    assert [type(door) for door in doors] == [StreamDoor, CallDoor]


def test_a_stream_that_the_server_ends_costs_nothing(
    served: Served, opened: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it ends one that has been silent for long: here each one after its first request."""
    wait, over = OpenStream.wait, set[OpenStream]()

    async def waiting(self: OpenStream, read: Any) -> Any:
        if self in over:
            return None
        over.add(self)
        return await wait(self, read)

    monkeypatch.setattr(OpenStream, "wait", waiting)
    with GrpcTransport(address(served), "a") as transport:
        spec = transport.enrol(Capability()).spec
        for n in range(3):
            transport.push(result_of(granted(transport, spec, f"t-{n}"), spec, f"u-{n}", 1.0))
    # Where a device asks before it hears of the end, that request is a call; the next one opens another.
    assert 3 <= opened["streams"] == opened["ask"] + opened["push"] <= 6
    assert (served.model() == 3.0).all()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams bring no answers, as behind a proxy that passes nothing on before their end."""

    async def reads_alone(self: DevicesAndExchange, requests: Any, context: Any) -> None:
        del self, requests
        while await context.read() is not grpc.aio.EOF:
            pass

    monkeypatch.setattr(DevicesAndExchange, "Exchange", reads_alone)


@pytest.mark.usefixtures("silent")
def test_a_stream_that_brings_nothing_gives_way_to_calls(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.client.transport.CONTROL_S", 3.0)
    with GrpcTransport(address(served), "a") as transport:
        spec = insist(lambda: transport.enrol(Capability())).spec
        assert insist(lambda: granted(transport, spec, "t-1")).task_id == "t-1"


@pytest.mark.parametrize("connection", ["auto", "stream"])
def test_a_network_that_cuts_loses_nothing_and_doubles_nothing(
    connection: str, served: Served, opened: Counter[str]
) -> None:
    cuts = [900 * KIB, 300 * KIB, 1_000, 700 * KIB, 500 * KIB, 450 * KIB, 30_000]
    with (
        FlakyProxy(address(served), cuts) as proxy,
        GrpcTransport(proxy.address, "a", reconnect_max_s=0.3, connection=connection) as transport,
    ):
        spec = insist(lambda: transport.enrol(Capability())).spec

        def work(n: int) -> int:
            task = insist(lambda: granted(transport, spec, f"t-{n}"))
            model = insist(lambda: transport.fetch(spec.layout_hash, task.base_version))
            assert (np.frombuffer(model.data, np.float32) == n).all()
            entry = result_of(task, spec, f"u-{n}", 1.0)
            version: int = insist(lambda: transport.push(entry)).version
            return version

        assert [work(n) for n in range(UPDATES)] == list(range(1, UPDATES + 1))
        assert proxy.connections > len(cuts) / 2
    assert opened["push"] >= (UPDATES if connection == "stream" else 1)
    assert (served.model() == UPDATES).all()


def test_a_closed_transport_is_unavailable(served: Served) -> None:
    transport = GrpcTransport(address(served), "a")
    spec = transport.enrol(Capability()).spec
    granted(transport, spec, "t-1")
    transport.close()
    with pytest.raises(Unavailable):
        transport.ask(Ask("a", "t-2"), spec)
