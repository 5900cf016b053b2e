"""Whatever is wrong gets its error, and leaves the model untouched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refusal_of
from wire import CALL_S, Device, Served, chunks, requests, server_config

from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.server.manifest import Manifest
from anabranch.server.store.factory import open_store
from anabranch.server.verify import verify

Call = Callable[[Device, devices.Task, bytes], Any]


def ones(device: Device) -> np.ndarray:
    return np.ones(device.spec.size, np.float32)


def push(device: Device, task: devices.Task, data: bytes, **header: Any) -> Any:
    return device.stub.PushUpdate(requests(device.header(task, data, **header), chunks(data)), timeout=CALL_S)


def poisoned(data: bytes) -> bytes:
    values = np.frombuffer(data, np.float32).copy()
    values[123] = np.nan
    return values.tobytes()


def messages(device: Device, task: devices.Task, data: bytes) -> Iterator[devices.PushUpdateRequest]:
    return requests(device.header(task, data), chunks(data))


OF_A_PART = devices.PushUpdateRequest(chunk=devices.UpdateChunk(part_id=1, data=bytes(8)))
BAD_PUSHES: dict[str, tuple[str, str, str, Call]] = {
    "not a number": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "layer.weight",
        lambda d, t, data: push(d, t, poisoned(data)),
    ),
    "too few values": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "need 400000",
        lambda d, t, data: push(d, t, data[:-4]),
    ),
    "too many values": (
        "OUT_OF_RANGE",
        "TooLarge",
        "needs at most 400000 for",
        lambda d, t, data: push(d, t, data + data[:4]),
    ),
    "no examples": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "examples is 0",
        lambda d, t, data: push(d, t, data, examples=0),
    ),
    "more examples than there are": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "examples must be at most",
        lambda d, t, data: push(d, t, data, examples=2**64 - 1),
    ),
    "a base beyond all versions": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "base_version must be at most",
        lambda d, t, data: push(d, t, data, base_version=2**64 - 1),
    ),
    "steps beyond counting": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "local_steps must be at most",
        lambda d, t, data: push(d, t, data, local_steps=2**64 - 1),
    ),
    "values out of bounds": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "over 1e+12",
        lambda d, t, data: push(d, t, (2e38 * ones(d)).astype(np.float32).tobytes()),
    ),
    "truncated": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "ended after 399000",
        lambda d, t, data: push(d, t, data[:399_000], size_bytes=len(data)),
    ),
    "longer than declared": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "over its declared",
        lambda d, t, data: push(d, t, data, size_bytes=len(data) - 4),
    ),
    "another digest": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "another digest",
        lambda d, t, data: push(d, t, data, sha256=b"\1" * 32),
    ),
    "a short digest": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "32 bytes",
        lambda d, t, data: push(d, t, data, sha256=b"\1"),
    ),
    "over the cap": (
        "OUT_OF_RANGE",
        "TooLarge",
        "needs at most 400000 for 100000 values",
        lambda d, t, data: push(d, t, data, size_bytes=1 << 40),
    ),
    "a chunk over the cap": (
        "OUT_OF_RANGE",
        "TooLarge",
        "cap of 1048576",
        lambda d, t, data: d.stub.PushUpdate(
            requests(d.header(t, data), chunks(bytes(1_048_577), size=1_048_577)), timeout=CALL_S
        ),
    ),
    "another manifest": (
        "FAILED_PRECONDITION",
        "ManifestMismatch",
        "enrol again",
        lambda d, t, data: push(d, t, data, manifest_sha256=b"\2" * 32),
    ),
    "an unknown codec": (
        "UNIMPLEMENTED",
        "UnknownCodec",
        "gzip",
        lambda d, t, data: push(d, t, data, codec="gzip"),
    ),
    "an unknown task": (
        "NOT_FOUND",
        "UnknownTask",
        "ask anew",
        lambda d, t, data: push(d, t, data, task_id="no-such-task"),
    ),
    "another's task": (
        "NOT_FOUND",
        "UnknownTask",
        "ask anew",
        lambda d, t, data: push(d, t, data, client_id="device-2"),
    ),
    "a path for an id": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "update_id",
        lambda d, t, data: push(d, t, data, update_id="../../etc/passwd"),
    ),
    "metrics not finite": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "'loss'",
        lambda d, t, data: push(d, t, data, metrics={"loss": float("nan")}),
    ),
    "no header": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "must be its header",
        lambda d, t, data: d.stub.PushUpdate(iter(list(messages(d, t, data))[1:]), timeout=CALL_S),
    ),
    "nothing at all": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "must be its header",
        lambda d, _t, _data: d.stub.PushUpdate(iter([]), timeout=CALL_S),
    ),
    "two headers": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "chunks only",
        lambda d, t, data: d.stub.PushUpdate(iter([next(messages(d, t, data))] * 2), timeout=CALL_S),
    ),
    "a chunk of another part": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        "of part 0",
        lambda d, t, data: d.stub.PushUpdate(iter([next(messages(d, t, data)), OF_A_PART]), timeout=CALL_S),
    ),
    "a gap": (
        "UNAVAILABLE",
        "Unavailable",
        "goes on at 0",
        lambda d, t, data: d.stub.PushUpdate(
            requests(d.header(t, data), chunks(data, offset=8)), timeout=CALL_S
        ),
    ),
}


@pytest.mark.parametrize("name", BAD_PUSHES)
def test_a_bad_push(name: str, served: Served) -> None:
    device = served.device()
    served.device("device-2")
    task = device.task()
    status, error, words, call = BAD_PUSHES[name]
    found = refusal_of(lambda: call(device, task, ones(device).tobytes()))
    assert found.kind == (status, error)
    assert words in found.details
    assert not served.model().any()
    assert device.work().decision.verdict == "published"  # and the server goes on
    served.close()
    assert verify(Path(served.config.server.data_dir)).problems == ()


def test_a_flaw_is_on_record_and_closes_its_task(served: Served) -> None:
    device = served.device()
    task, data = device.task(), poisoned(ones(device).tobytes())
    first = refusal_of(lambda: push(device, task, data, update_id="bad"))
    assert first.status == "INVALID_ARGUMENT"
    verdict = device.query("bad").verdict.decision
    assert (verdict.verdict, verdict.reason) == ("rejected", "invalid")
    assert push(device, task, data, update_id="bad").status == devices.PUSH_STATUS_DUPLICATE
    assert refusal_of(lambda: push(device, task, data, update_id="other")).error == "UnknownTask"


def test_a_stale_update_is_a_recorded_rejection(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data", server={"staleness_max": 1})
    with Served(config, manifest) as served:
        slow, fast = served.device("slow"), served.device("fast")
        task = slow.task()
        for _ in range(2):
            fast.work()
        answer = slow.push(task, ones(slow))
        assert (answer.decision.verdict, answer.decision.reason) == ("rejected", "stale")
        assert answer.decision.staleness == 2
        assert (served.model() == 2.0).all()


BAD_CALLS: dict[str, tuple[str, str, Callable[[Device], Any]]] = {
    "a client id with a slash": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        lambda d: d.stub.Enrol(devices.EnrolRequest(client_id="a/b", protocol_version=1)),
    ),
    "a bandwidth that is no number": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        lambda d: d.stub.Enrol(
            devices.EnrolRequest(
                client_id="a", protocol_version=1, capability=devices.Capability(up_bps=float("inf"))
            )
        ),
    ),
    "more examples than can be": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        lambda d: d.stub.Enrol(
            devices.EnrolRequest(
                client_id="a", protocol_version=1, capability=devices.Capability(examples=2**64 - 1)
            )
        ),
    ),
    "another protocol": (
        "INVALID_ARGUMENT",
        "ConfigError",
        lambda d: d.stub.Enrol(devices.EnrolRequest(client_id="a", protocol_version=99)),
    ),
    "an ask with another manifest": (
        "FAILED_PRECONDITION",
        "ManifestMismatch",
        lambda d: d.stub.AskTask(devices.AskTaskRequest(client_id="a", task_id="t", manifest_sha256=b"x")),
    ),
    "a version to come": ("NOT_FOUND", "UnknownVersion", lambda d: d.fetch(version=12)),
    "a part that is not there": ("NOT_FOUND", "UnknownVersion", lambda d: d.fetch(part_id=1)),
    "an offset past the end": ("INVALID_ARGUMENT", "InvalidUpdate", lambda d: d.fetch(offset=1 << 40)),
    "a long id": ("INVALID_ARGUMENT", "InvalidUpdate", lambda d: d.query("x" * 65)),
    "progress not finite": (
        "INVALID_ARGUMENT",
        "InvalidUpdate",
        lambda d: d.heartbeat("task", progress=float("inf")),
    ),
    "a message over the cap": (
        "RESOURCE_EXHAUSTED",
        "",
        lambda d: d.stub.Enrol(devices.EnrolRequest(client_id="x" * (2 << 20))),
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call(name: str, served: Served) -> None:
    status, error, call = BAD_CALLS[name]
    device = served.device()
    assert refusal_of(lambda: call(device)).kind == (status, error)
    assert device.work().decision.verdict == "published"


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, 2**64 - 1])
def test_of_versions_that_no_database_can_count_there_are_none(number: int, served: Served) -> None:
    """They are nobody's fault but the caller's: not a store's that would be damaged."""
    device = served.device()
    device.work()
    for after, to in ((number, number), (number, 2**64 - 1), (1, number)):
        request = devices.GetLinksRequest(after_version=after, to_version=to)
        assert device.stub.GetLinks(request, timeout=CALL_S).links == b""
    whole = devices.GetLinksRequest(after_version=0, to_version=number)
    assert len(device.stub.GetLinks(whole, timeout=CALL_S).links) == 32
    listed = operators.ListVersionsRequest(after=number)
    assert not served.operator().ListVersions(listed, timeout=CALL_S).versions


def test_of_the_stages_that_a_device_names_those_that_exist_are_kept(
    tmp_path: Path, manifest: Manifest
) -> None:
    with Served(server_config(tmp_path / "data"), manifest) as served:
        served.device(codecs=("topk:1", "gaps", "topk:1", "topk:99", "from-the-future:3"))
    again = open_store("", tmp_path / "data")
    (enrolled,) = (r for _, r in again.records() if r["kind"] == "enrolled")
    again.close()
    assert enrolled["capability"]["codecs"] == ["topk:1", "gaps"]


BAD_CODECS = [("Topk:1",), ("topk:one",), ("topk\n",), ("",), ("t" * 65,), ("topk:1",) * 65]


@pytest.mark.parametrize("codecs", BAD_CODECS)
def test_names_of_stages_have_their_form(codecs: tuple[str, ...], served: Served) -> None:
    found = refusal_of(lambda: served.device(codecs=codecs))
    assert found.kind == ("INVALID_ARGUMENT", "InvalidUpdate")
    assert "capability.codecs: at most 64 stages, names of 1 to 64" in found.details


def test_an_unknown_client_is_refused(served: Served) -> None:
    stranger = Device(served.channel(), served.manifest.spec, "stranger")
    assert stranger.ask().refusal.reason == "unknown_client"


def test_metrics_of_a_version_to_come(served: Served) -> None:
    request = operators.ReportMetricsRequest(version=9, metrics={"accuracy": 1.0})
    assert refusal_of(lambda: served.operator().ReportMetrics(request)).error == "UnknownVersion"


def test_too_many_uploads_are_told_when_to_come(tmp_path: Path, manifest: Manifest) -> None:
    limits = replace(DEFAULT_LIMITS, uploads_inflight_max=0, inline_bytes_max=1000)
    with Served(server_config(tmp_path / "data"), manifest, limits) as served:
        device = served.device()
        task = device.task()
        found = refusal_of(lambda: device.answer(task))
        assert found.kind == ("RESOURCE_EXHAUSTED", "Overloaded")
        earliest_s, latest_s = found.retry_after_s
        assert 0 < earliest_s <= latest_s


def test_small_uploads_are_counted_by_their_bytes(tmp_path: Path, manifest: Manifest) -> None:
    many, over = DEFAULT_LIMITS.uploads_inflight_max + 16, threading.Event()
    with Served(server_config(tmp_path / "data"), manifest) as served, ThreadPoolExecutor(many) as pool:
        crowd = [served.device(f"device-{n}") for n in range(many)]
        tasks = [device.task() for device in crowd]
        begun = threading.Barrier(many + 1)

        def send(device: Device, task: devices.Task) -> str:
            def slowly() -> Iterator[devices.PushUpdateRequest]:
                parts = messages(device, task, ones(device).tobytes())
                yield next(parts)
                begun.wait(CALL_S)
                over.wait(CALL_S)
                yield from parts

            verdict: str = device.stub.PushUpdate(slowly(), timeout=CALL_S).decision.verdict
            return verdict

        sent = [pool.submit(send, *pair) for pair in zip(crowd, tasks, strict=True)]
        begun.wait(CALL_S)
        assert served.device("one-more").work().decision.verdict == "published"
        over.set()
        assert {future.result() for future in sent} == {"published"}


@pytest.mark.parametrize("with_empty_chunks", [False, True])
def test_a_stalled_upload_is_cut(tmp_path: Path, manifest: Manifest, with_empty_chunks: bool) -> None:
    limits = replace(DEFAULT_LIMITS, upload_idle_s=1.0 if with_empty_chunks else 0.1)
    with Served(server_config(tmp_path / "data"), manifest, limits) as served:
        device = served.device()
        task, data = device.task(), ones(device).tobytes()

        def stalled() -> Iterator[devices.PushUpdateRequest]:
            parts = messages(device, task, data)
            yield next(parts)
            part = next(parts)
            yield part
            empty = devices.UpdateChunk(offset=part.chunk.offset + len(part.chunk.data))
            while with_empty_chunks and not cut.is_set():
                yield devices.PushUpdateRequest(chunk=empty)
            cut.wait(CALL_S)  # until the server has had enough

        cut = threading.Event()
        call = device.stub.PushUpdate.future(stalled())
        call.add_done_callback(lambda _: cut.set())
        found = refusal_of(lambda: call.result(CALL_S))
        assert found.kind == ("UNAVAILABLE", "Unavailable")
        assert "the upload came too slowly and was cut" in found.details
    with Served(
        server_config(tmp_path / "data"), manifest
    ) as served:  # which waits longer for a slow machine
        assert served.device().push(task, ones(device)).decision.verdict == "published"
