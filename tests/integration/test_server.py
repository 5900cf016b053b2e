"""A real server over real gRPC: what a device and an operator can do, and what a restart keeps."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from safetensors.numpy import load
from waits import until
from wire import CALL_S, CHUNK, Device, Served, chunks, requests, server_config

from anabranch.compress.model import decode_model
from anabranch.compress.registry import make_codec
from anabranch.core.model.params import digest
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub
from anabranch.protos.v1.operators_pb2_grpc import OperatorsStub
from anabranch.server.manifest import Manifest
from anabranch.server.verify import verify


def ones(device: Device, value: float = 1.0) -> np.ndarray:
    return np.full(device.spec.size, value, np.float32)


def test_a_device_works(served: Served) -> None:
    device = served.device()
    enrolled = device.enrol()
    assert enrolled.manifest.sha256 == device.manifest_sha256
    task = device.task()
    header, data = device.fetch(version=task.base_version)
    assert header.part == task.parts[0]
    assert hashlib.sha256(data).digest() == header.part.sha256
    vector, frozen = decode_model(make_codec("raw"), device.spec, data)
    assert not vector.any()
    assert frozen["layer.seen"] == [7]
    answer = device.push(task, ones(device, 2.0), examples=3, local_steps=4, metrics={"loss": 0.5})
    assert answer.status == devices.PUSH_STATUS_ACCEPTED
    assert (answer.decision.verdict, answer.decision.staleness, answer.version) == ("published", 0, 1)
    assert (served.model() == 2.0).all()


def test_calls_may_be_repeated(served: Served) -> None:
    device = served.device()
    first, again = device.ask("task-1"), device.ask("task-1")
    assert first.task == again.task
    delta = ones(device)
    accepted = device.push(first.task, delta, "update-1")
    repeated = device.push(first.task, delta, "update-1")
    assert repeated.status == devices.PUSH_STATUS_DUPLICATE
    assert (repeated.decision, repeated.version) == (accepted.decision, accepted.version)
    assert device.query("update-1").verdict.decision == accepted.decision
    assert (served.model() == 1.0).all()


def test_an_upload_goes_on_where_its_stream_broke(served: Served) -> None:
    device = served.device()
    task, data = device.task(), ones(device).tobytes()
    header, first = device.header(task, data, "update-1"), next(chunks(data))
    sent, broken = threading.Event(), threading.Event()

    def half() -> Any:
        yield from requests(header, [first])
        sent.set()
        broken.wait(CALL_S)

    call = device.stub.PushUpdate.future(half())
    assert sent.wait(CALL_S)
    until(lambda: served.operator().GetStatus(operators.GetStatusRequest()).uplink_bytes)
    call.cancel()
    broken.set()
    received = until(lambda: device.query("update-1").received_bytes)
    assert received == CHUNK
    answer = device.push(task, ones(device), "update-1", offset=received)
    assert answer.status == devices.PUSH_STATUS_ACCEPTED
    assert (served.model() == 1.0).all()


def test_a_newer_stream_of_an_upload_takes_over(served: Served) -> None:
    device = served.device()
    task, data = device.task(), ones(device).tobytes()
    header, done = device.header(task, data, "update-1"), threading.Event()

    def stalled() -> Any:
        yield from requests(header, [next(chunks(data))])
        done.wait(CALL_S)
        yield devices.PushUpdateRequest(chunk=list(chunks(data))[1])

    older = device.stub.PushUpdate.future(stalled())
    until(lambda: served.operator().GetStatus(operators.GetStatusRequest()).uplink_bytes)
    assert device.push(task, ones(device), "update-1").status == devices.PUSH_STATUS_ACCEPTED
    done.set()
    with pytest.raises(grpc.RpcError, match="upload update-1 goes on in a newer stream"):
        older.result(CALL_S)
    assert (served.model() == 1.0).all()


def test_a_fetch_goes_on_at_any_offset(served: Served) -> None:
    device = served.device()
    _, whole = device.fetch()
    header, rest = device.fetch(version=0, offset=300_000)
    assert header.part.size_bytes == len(whole)
    assert rest == whole[300_000:]


def test_a_follower_sees_what_is_new(served: Served) -> None:
    device = served.device()
    header, data = device.fetch(newer_than=0)
    assert header.not_modified
    assert data == b""
    device.work()
    header, data = device.fetch(newer_than=0)
    assert not header.not_modified
    assert header.version == 1
    assert header.published_at_s > 0
    assert len(data) == header.part.size_bytes


def test_heartbeats_renew_and_tell(served: Served) -> None:
    device = served.device()
    task = device.task()
    renewed = device.heartbeat(task.task_id, progress=1)
    assert renewed.expires_at_s > task.expires_at_s
    assert not renewed.notices
    assert device.heartbeat(task.task_id, progress=1).expires_at_s == renewed.expires_at_s
    (notice,) = device.heartbeat("no-such-task").notices
    assert notice.kind == devices.NOTICE_KIND_CANCEL
    device.stub.DropTask(devices.DropTaskRequest(client_id="device-1", task_id=task.task_id, why="tired"))
    (notice,) = device.heartbeat(task.task_id).notices
    assert notice.kind == devices.NOTICE_KIND_CANCEL


def test_a_run_ends_with_its_budget(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data", run={"versions_max": 1})
    with Served(config, manifest) as served:
        device = served.device()
        spare = served.device("device-2").task()
        device.work()
        assert device.ask().refusal.final
        assert device.fetch(newer_than=0)[0].final
        (notice,) = device.heartbeat(spare.task_id).notices
        assert notice.kind == devices.NOTICE_KIND_FINISHED
        assert served.operator().GetStatus(operators.GetStatusRequest()).finished


def test_leases_expire_by_themselves(tmp_path: Path, manifest: Manifest) -> None:
    short = {"lease_s": 0.2, "lease_min_s": 0.1, "concurrency": 1}
    with Served(server_config(tmp_path / "data", server=short), manifest) as served:
        task = served.device().task()
        other = served.device("device-2")
        while not other.ask().HasField("task"):  # there is one place
            pass
        late = served.device().push(task, ones(other))
        assert late.decision.verdict == "published"


def test_a_device_that_waits_goes_before_one_that_has_just_pushed(tmp_path: Path, manifest: Manifest) -> None:
    patient = {"concurrency": 1, "retry_after_min_s": CALL_S, "retry_after_max_s": CALL_S}
    with Served(server_config(tmp_path / "data", server=patient), manifest) as served:
        quick, waiting = served.device(), served.device("device-2")
        task = quick.task()
        assert waiting.ask().refusal.reason == "at_capacity"
        quick.push(task, ones(quick))
        refusal = quick.ask().refusal
        assert (refusal.reason, refusal.detail) == (
            "at_capacity",
            "devices that have waited longer for a place: 1",
        )
        assert waiting.ask().HasField("task")


def test_an_operator_looks_and_pauses(served: Served) -> None:
    device, operator = served.device(), served.operator()
    device.work()
    operator.Pause(operators.PauseRequest())
    refusal = device.ask().refusal
    assert (refusal.reason, refusal.final) == ("paused", False)
    assert 0 < refusal.retry_after.earliest_s <= refusal.retry_after.latest_s
    operator.Resume(operators.ResumeRequest())
    task = device.task()
    status = operator.GetStatus(operators.GetStatusRequest())
    assert (status.version, status.updates_applied, status.clients, status.live_tasks) == (1, 1, 1, 1)
    assert status.uplink_bytes == 4 * device.spec.size
    assert not status.paused
    operator.ReportMetrics(operators.ReportMetricsRequest(version=1, metrics={"accuracy": 0.5}))
    (version,) = operator.ListVersions(operators.ListVersionsRequest()).versions
    assert (version.version, version.updates, dict(version.metrics)) == (1, 1, {"accuracy": 0.5})
    assert version.sha256.hex() == digest(ones(device))
    assert device.push(task, ones(device)).decision.verdict == "published"


def test_an_export_is_a_safetensors_file(served: Served) -> None:
    device = served.device()
    device.work(3.0)
    messages = list(served.operator().Export(operators.ExportRequest()))
    tensors = load(b"".join(m.data for m in messages))
    assert messages[0].version == 1
    assert (tensors["layer.weight"] == 3.0).all()
    assert tensors["layer.seen"] == [7]


def test_a_watch_tells_what_happens(served: Served) -> None:
    device = served.device()
    device.work()
    watch = served.operator().Watch(operators.WatchRequest(after_seq=1), timeout=CALL_S)
    seen = [next(watch) for _ in range(3)]
    assert [w.kind for w in seen] == ["granted", "decided", "published"]
    device.work()
    assert next(watch).kind == "granted"
    watch.cancel()
    resumed = served.operator().Watch(operators.WatchRequest(after_seq=seen[0].seq), timeout=CALL_S)
    assert next(resumed).kind == "decided"
    resumed.cancel()


def test_health_and_reflection(served: Served) -> None:
    for admin in (False, True):
        stub: Any = health_pb2_grpc.HealthStub(served.channel(admin))
        for name in ("", "liveness", "aggregator"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=CALL_S)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub
    listed = next(reflection(served.channel(admin=True)).ServerReflectionInfo(iter([ask])))
    names = {s.name for s in listed.list_services_response.service}
    assert "anabranch.v1.Operators" in names
    with pytest.raises(grpc.RpcError) as refused:
        next(reflection(served.channel()).ServerReflectionInfo(iter([ask])))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_port_answers_its_own_calls_alone_whatever_was_called_on_the_other(
    tmp_path: Path, manifest: Manifest
) -> None:
    with Served(server_config(tmp_path / "data"), manifest) as served:
        served.device().work()
        served.operator().GetStatus(operators.GetStatusRequest(), timeout=600)
        of_others: list[tuple[Any, Any]] = [
            (OperatorsStub(served.channel()).GetStatus, operators.GetStatusRequest()),
            (DevicesStub(served.channel(admin=True)).AskTask, devices.AskTaskRequest()),
        ]
        for call, request in of_others:
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=600)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_restart_goes_on_where_it_was(
    database: str, tmp_path: Path, manifest: Manifest, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("postgresql_url") if database == "postgresql" else ""
    config = server_config(tmp_path / "data", server={"database": url}, strategy={"buffer_size": 2})
    with Served(config, manifest) as served:
        device = served.device()
        for value in (1.0, 2.0, 4.0):
            device.work(value)
        task = device.task()
        before = served.model()
        assert served.close() == 0
    found = verify(tmp_path / "data", url)
    assert (found.problems, found.version, found.updates) == ((), 1, 3)
    with Served(config, manifest) as served:
        assert served.info is not None
        assert (served.info.version, served.info.replayed) == (1, 0)
        device = served.device()
        assert np.array_equal(served.model(), before)
        _, fetched = device.fetch(version=task.base_version)
        assert len(fetched) == task.parts[0].size_bytes
        answer = device.push(task, ones(device, 6.0), "late")
        assert (answer.decision.verdict, answer.version) == ("published", 2)
        assert device.push(task, ones(device, 6.0), "late").status == devices.PUSH_STATUS_DUPLICATE
        assert np.array_equal(served.model(), before + 5.0)
    assert verify(tmp_path / "data", url).problems == ()
