"""The other door: a run's life over one stream, and what becomes of streams that are cut, idle or hostile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from streams import Stream, StreamDevice, stream
from wire import CALL_S, CHUNK, Device, Served, server_config

from anabranch.client.transport import GrpcTransport
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.updates import Capability
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.protos.v1.operators_pb2_grpc import OperatorsStub
from anabranch.server.manifest import Manifest

FLOOD = 10_000


@pytest.fixture
def device(served: Served) -> Iterator[StreamDevice]:
    """A device whose requests go over a stream, but for its enrolment."""
    made = StreamDevice(served.channel(), served.manifest.spec, "device-1")
    made.enrol()
    yield made
    made.close()


def bytes_of(manifest: Manifest, value: float = 1.0) -> bytes:
    """A delta of one value, as it travels."""
    return np.full(manifest.spec.size, value, np.float32).tobytes()


# --- what it is for ------------------------------------------------------------------------------


def test_a_whole_life_over_one_stream(device: StreamDevice, served: Served) -> None:
    task = device.task()
    header, data = device.fetch(version=0)
    by_call = Device(served.channel(), served.manifest.spec, "device-1").fetch(version=0)
    assert (header.version, header.part.size_bytes, data) == (0, len(data), by_call[1])
    assert header == by_call[0]
    assert len(data) > CHUNK, "it has more messages than one"
    assert device.heartbeat(task.task_id).expires_at_s >= task.expires_at_s
    assert device.query("update-1").received_bytes == 0
    first = device.answer(task, 2.0, update_id="update-1", next=device.asked("task-2"))
    assert (first.decision.verdict, first.version, first.next.task.base_version) == ("published", 1, 1)
    assert device.query("update-1").verdict.decision == first.decision
    drop = devices.DropTaskRequest(client_id="device-1", task_id="task-2", why="the test wants it so")
    device._said("drop", drop)
    (notice,) = device.heartbeat("task-2").notices
    assert notice.kind == devices.NOTICE_KIND_CANCEL
    assert not device.fetch(newer_than=1)[1]
    assert (served.model() == 2.0).all()


def heard_model(said: Stream) -> tuple[devices.ModelHeader, bytes]:
    """The model that comes on a stream now."""
    first = last = said.hear()
    data = bytearray(first.data)
    while last.head.more:
        last = said.hear()
        assert (last.head.WhichOneof("answer"), last.head.offset) == (None, len(data))
        data += last.data
    return first.head.fetch, bytes(data)


def test_a_model_follows_the_grant_for_who_wants_it(device: StreamDevice, served: Served) -> None:
    asked = device.asked("task-1")
    asked.with_model = True
    with stream(served.channel()) as said:
        said.say(ask=asked)
        grant = said.hear().head
        assert (grant.ask.task.base_version, grant.more) == (0, True)
        assert heard_model(said) == device.fetch(version=0)
        data = bytes_of(served.manifest)
        following = device.asked("task-2")
        following.with_model, following.holds_version = True, 0
        said.push(device.header(grant.ask.task, data, next=following), data)
        verdict = said.hear().head
        assert (verdict.push.next.task.base_version, verdict.more) == (1, True)
        header, model = heard_model(said)
        assert (header, model) == device.fetch(version=1)
        assert header.version == 1
        assert model.startswith(served.model().tobytes())
        query = devices.QueryUploadRequest(client_id="device-1", update_id="update-1")
        said.say(query=query)
        assert said.hear().head.WhichOneof("answer") == "query", "the stream goes on"


@pytest.mark.parametrize(("wants", "holds"), [(False, None), (True, 0)])
def test_no_model_follows_where_it_is_not_wanted_or_held(
    wants: bool, holds: int | None, device: StreamDevice, served: Served
) -> None:
    asked = device.asked("task-1")
    asked.with_model = wants
    if holds is not None:
        asked.holds_version = holds
    with stream(served.channel()) as said:
        said.say(ask=asked)
        grant = said.hear().head
        assert (grant.ask.task.base_version, grant.more) == (0, False)
        said.say(ask=device.asked("task-1"))
        assert said.hear().head.WhichOneof("answer") == "ask"


def test_a_refusal_brings_no_model_and_a_call_none_either(device: StreamDevice, served: Served) -> None:
    other = Device(served.channel(), served.manifest.spec, "device-2")  # which never enrols
    asked = other.asked("task-9")
    asked.with_model = True
    with stream(served.channel()) as said:
        said.say(ask=asked)
        refused = said.hear().head
        assert (refused.ask.refusal.reason, refused.more) == ("unknown_client", False)
    by_call = Device(served.channel(), served.manifest.spec, "device-1")
    request = by_call.asked("task-1")
    request.with_model = True
    assert by_call.stub.AskTask(request, timeout=CALL_S).HasField("task")


def test_a_model_that_is_cut_goes_on_from_there(device: StreamDevice, served: Served) -> None:
    asked = device.asked("task-1")
    asked.with_model = True
    with stream(served.channel()) as said:
        said.say(ask=asked)
        assert said.hear().head.more
        first = said.hear()
        assert first.head.more
    rest = device.fetch(version=0, offset=len(first.data))[1]
    assert first.data.tobytes() + rest == device.fetch(version=0)[1]


def test_an_update_that_was_cut_goes_on_over_another_stream(device: StreamDevice, served: Served) -> None:
    task, data = device.task(), bytes_of(served.manifest)
    header = device.header(task, data, "update-1")
    received = 0
    while not received:  # on a busy machine a cut is there before what was sent, or not noticed yet
        with stream(served.channel()) as cut:
            cut.say(data[:CHUNK], push=header, more=True)
            time.sleep(0.02)
        received = device.query("update-1").received_bytes
    assert received == CHUNK
    assert device.send(task, data, "update-1", received).decision.verdict == "published"
    assert device.send(task, data, "update-1", received).status == devices.PUSH_STATUS_DUPLICATE
    assert (served.model() == 1.0).all()


def test_a_header_may_come_without_bytes(device: StreamDevice, served: Served) -> None:
    task, data = device.task(), bytes_of(served.manifest)
    with stream(served.channel()) as split:
        split.say(push=device.header(task, data), more=True)
        split.say(data[:CHUNK], more=True)
        split.say(data[CHUNK:], offset=CHUNK)
        assert split.hear().head.push.decision.verdict == "published"


def test_an_answer_before_the_last_byte_ends_the_stream(device: StreamDevice, served: Served) -> None:
    task, data = device.task(), bytes_of(served.manifest)
    device.send(task, data, "update-1")
    with stream(served.channel()) as again:
        again.say(data[:CHUNK], push=device.header(task, data, "update-1"), more=True)
        assert again.hear().head.push.status == devices.PUSH_STATUS_DUPLICATE
        assert again.over() == ("OK", "")


# --- ends in good order --------------------------------------------------------------------------


@pytest.mark.parametrize(("idle_s", "age_s"), [(0.1, 10 * CALL_S), (10 * CALL_S, 0.1)])
def test_a_stream_on_which_nothing_comes_or_that_is_old_is_ended(
    idle_s: float, age_s: float, device: StreamDevice, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.server.streams.IDLE_S", idle_s)
    monkeypatch.setattr("anabranch.server.streams.AGE_S", age_s)
    with stream(served.channel()) as silent:
        assert silent.over() == ("OK", "")
    assert device.work().decision.verdict == "published", "the device opens another"


def refused(operator: OperatorsStub) -> bool:
    """Whether the operators' port takes no more calls, soon."""
    until = time.monotonic() + CALL_S
    while time.monotonic() < until:
        try:
            operator.GetMetrics(operators.GetMetricsRequest())
        except grpc.RpcError:
            return True
    return False


def test_streams_end_when_the_server_goes_down_and_nobody_waits_for_them(
    tmp_path: Path, manifest: Manifest
) -> None:
    config = server_config(tmp_path / "data", server={"drain_s": 10 * CALL_S})
    with Served(config, manifest) as served, ExitStack() as stack:
        device = served.device()
        idle = [stack.enter_context(stream(served.channel())) for _ in range(3)]
        for one in idle:
            one.say(heartbeat=devices.HeartbeatRequest(client_id="device-1", task_id="t"))
            one.hear()
        task, data = device.task(), bytes_of(manifest)
        busy = stack.enter_context(stream(served.channel()))
        busy.say(data[:CHUNK], push=device.header(task, data, "update-1"), more=True)
        operator = served.operator()
        while not operator.GetMetrics(operators.GetMetricsRequest()).uploads_open:
            pass
        ends: list[tuple[str, str]] = []
        draining = threading.Thread(target=served.close)
        draining.start()
        ends += [one.over() for one in idle]
        assert refused(operator), "no port waits for what is under way on another"
        busy.say(data[CHUNK:], offset=CHUNK)  # what is under way comes to its end
        assert busy.hear().head.push.decision.verdict == "published"
        ends.append(busy.over())
        draining.join(CALL_S)
    assert (ends, served.exit_code) == ([("OK", "")] * 4, 0)


def test_who_comes_too_many_makes_calls(tmp_path: Path, manifest: Manifest) -> None:
    limits = replace(DEFAULT_LIMITS, rpcs_max=4)
    config = server_config(tmp_path / "data", client={"connection": "auto"})
    with Served(config, manifest, limits) as served, ExitStack() as stack:
        device = served.device()
        for _ in range(2):
            one = stack.enter_context(stream(served.channel()))
            one.say(heartbeat=devices.HeartbeatRequest(client_id="device-1", task_id="t"))
            one.hear()
        with stream(served.channel()) as third:
            assert third.over() == ("OK", "")
        assert device.work().decision.verdict == "published"
        assert served.info is not None
        with GrpcTransport(served.info.address, "device-2") as transport:
            spec = transport.enrol(Capability()).spec
            assert transport.fetch(spec.layout_hash).version == 1


# --- hostile clients -----------------------------------------------------------------------------

Misuse = Callable[[Stream, Device, bytes], None]


def chunks_first(hostile: Stream, device: Device, data: bytes) -> None:
    del device
    hostile.say(data[:CHUNK], more=True)


def nothing_at_all(hostile: Stream, device: Device, data: bytes) -> None:
    del device, data
    hostile.say_bytes(b"")


def a_push_in_a_push(hostile: Stream, device: Device, data: bytes) -> None:
    task = device.task()
    hostile.say(data[:CHUNK], push=device.header(task, data), more=True)
    hostile.say(data[CHUNK:], push=device.header(task, data))


def more_than_was_declared(hostile: Stream, device: Device, data: bytes) -> None:
    hostile.push(device.header(device.task(), data), data + bytes(4))


def less_than_was_declared(hostile: Stream, device: Device, data: bytes) -> None:
    hostile.push(device.header(device.task(), data), data[:-4])


def another_digest(hostile: Stream, device: Device, data: bytes) -> None:
    hostile.push(device.header(device.task(), data, sha256=bytes(32)), data)


def a_chunk_over_the_cap(hostile: Stream, device: Device, data: bytes) -> None:
    over = DEFAULT_LIMITS.chunk_bytes_max + 1
    hostile.push(device.header(device.task(), data), bytes(over), size=over)


def a_message_over_the_cap(hostile: Stream, device: Device, data: bytes) -> None:
    del device, data
    hostile.say(bytes(DEFAULT_LIMITS.message_bytes_max))


def a_task_of_nobody(hostile: Stream, device: Device, data: bytes) -> None:
    hostile.push(device.header(devices.Task(task_id="t-0"), data), data)


def an_id_of_no_form(hostile: Stream, device: Device, data: bytes) -> None:
    del device, data
    hostile.say(heartbeat=devices.HeartbeatRequest(client_id="../..", task_id="t"))


def another_model(hostile: Stream, device: Device, data: bytes) -> None:
    del device, data
    hostile.say(ask=devices.AskTaskRequest(client_id="hostile", task_id="t", manifest_sha256=bytes(32)))


MISUSES: dict[Misuse, tuple[str, str]] = {
    chunks_first: ("INVALID_ARGUMENT", "InvalidUpdate"),
    nothing_at_all: ("INVALID_ARGUMENT", "InvalidUpdate"),
    a_push_in_a_push: ("INVALID_ARGUMENT", "InvalidUpdate"),
    more_than_was_declared: ("INVALID_ARGUMENT", "InvalidUpdate"),
    less_than_was_declared: ("INVALID_ARGUMENT", "InvalidUpdate"),
    another_digest: ("INVALID_ARGUMENT", "InvalidUpdate"),
    a_chunk_over_the_cap: ("OUT_OF_RANGE", "TooLarge"),
    a_message_over_the_cap: ("RESOURCE_EXHAUSTED", ""),
    a_task_of_nobody: ("NOT_FOUND", "UnknownTask"),
    an_id_of_no_form: ("INVALID_ARGUMENT", "InvalidUpdate"),
    another_model: ("FAILED_PRECONDITION", "ManifestMismatch"),
}


def test_misuse_ends_the_stream_as_it_ends_a_call(device: StreamDevice, served: Served) -> None:
    found = {}
    for misuse in MISUSES:
        with stream(served.channel()) as hostile:
            misuse(hostile, served.device("hostile"), bytes_of(served.manifest))
            found[misuse] = hostile.over()
    assert found == MISUSES
    assert device.work().decision.verdict == "published"
    assert (served.model() == 1.0).all()


def test_ten_thousand_heartbeats_are_too_often(tmp_path: Path, manifest: Manifest) -> None:
    limits = replace(DEFAULT_LIMITS, calls_per_minute=300)
    with Served(server_config(tmp_path / "data"), manifest, limits) as served:
        device = served.device("device-1")
        beat = devices.HeartbeatRequest(client_id="hostile", task_id="t")
        with stream(served.channel()) as flood:
            for _ in range(FLOOD):
                flood.say(heartbeat=beat)
            assert device.work().decision.verdict == "published"
            assert flood.over() == ("RESOURCE_EXHAUSTED", "Overloaded")
        with stream(served.channel()) as again:
            for _ in range(FLOOD):  # a few are allowed again by now
                again.say(heartbeat=beat)
            assert again.over() == ("RESOURCE_EXHAUSTED", "Overloaded"), "another stream is the same client's"
        assert device.work().decision.verdict == "published"


def test_who_never_reads_holds_nobody_up(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data", server={"drain_s": 0.5})
    with Served(config, manifest) as served, ExitStack() as stack:
        device = served.device()
        for n in range(4):
            deaf = stack.enter_context(stream(served.channel()))
            for _ in range(50):  # of 400 kB each
                request = devices.FetchModelRequest(
                    client_id=f"deaf-{n}", manifest_sha256=device.manifest_sha256
                )
                deaf.say(fetch=request)
        assert [device.work().decision.verdict for _ in range(5)] == ["published"] * 5
        assert served.close() == 0
