"""Too many connections or calls, large headers, a full disk: refused with a reason, and it passes."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from fire import Healthy, target
from refusals import refusal_of
from server_process import Plan, ServerProcess
from small_disks import own_disk
from wire import CALL_S, CHUNK, QUICK, Device, Served, chunks, requests, server_config

from anabranch.client.stopping import Bell, persist
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import AnabranchError, Overloaded, StoreFull, Unavailable
from anabranch.core.limits import DEFAULT_LIMITS, MIB
from anabranch.core.model.updates import Receipt
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.ports import FILES_KEPT, connections_within
from anabranch.server.store.base import Store
from anabranch.server.store.factory import open_store
from anabranch.server.store.memory import MemoryStore
from anabranch.server.store.sql import SqlStore
from anabranch.server.verify import verify

SILENT = 150
CALLERS, CALLS = 16, 5


def closed(sockets: list[socket.socket], within_s: float) -> int:
    """How many of them the server hangs up on."""
    latest, count = time.monotonic() + within_s, 0
    for s in sockets:
        s.settimeout(max(0.01, latest - time.monotonic()))
        try:
            while s.recv(4096):
                pass
            count += 1
        except ConnectionError:
            count += 1
        except TimeoutError:
            pass
    return count


def test_connections_are_counted_and_those_that_say_nothing_are_closed(tmp_path: Path) -> None:
    with target(tmp_path, 300, {"connections_max": 60, "handshake_s": 3.0}) as server:
        host, _, port = server.address.rpartition(":")
        with Healthy(server, 2) as healthy:
            while healthy.applied < 2:
                time.sleep(0.01)
            before = healthy.applied
            sockets = [socket.create_connection((host, int(port)), 600.0) for _ in range(SILENT)]
            assert closed(sockets[-20:], 600.0) == 20
            assert server.connections < SILENT
            while healthy.applied < before + 10:  # who was connected is served
                time.sleep(0.01)
            assert closed(sockets[:-20], 600.0) == SILENT - 20
        with Healthy(server, 2) as later:  # and then there is room again
            while later.applied < 2 and not later.problems:
                time.sleep(0.01)
        for s in sockets:
            s.close()
        assert (healthy.problems, later.problems) == ([], [])
        server.close(healthy.applied + later.applied)


def test_few_open_files_are_said_with_what_they_allow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allowed = [(256, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: allowed[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: allowed.append(limits))
    assert connections_within(10_000) == 1024 - FILES_KEPT
    assert allowed[-1] == (1024, 1024)
    assert f"1024 files open, so of the devices at most {1024 - FILES_KEPT} may be connected" in caplog.text
    assert str(10_000 + FILES_KEPT) in caplog.text
    caplog.clear()
    allowed.append((65_536, 65_536))
    assert connections_within(10_000) == 10_000
    assert caplog.text == ""


METHODS = [
    method
    for pb2 in (devices, operators)
    for service in pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_bytes_that_are_no_message_are_the_senders_fault(method: Any, served: Served) -> None:
    channel = served.channel(admin=method.containing_service.name == "Operators")
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = ("stream" if method.client_streaming else "unary") + "_"
    call = getattr(channel, kind + ("stream" if method.server_streaming else "unary"))(path)
    sent = iter([b"\xff"]) if method.client_streaming else b"\xff"
    found = refusal_of(lambda: list(call(sent, timeout=CALL_S)))  # a unary call does not get that far
    assert found.kind == ("INVALID_ARGUMENT", "InvalidUpdate")
    assert f"1 bytes are no request of {method.name}" in found.details


def test_large_headers_are_refused(served: Served) -> None:
    device = served.device()
    request = devices.QueryUploadRequest(client_id="device-1", update_id="u")
    device.stub.QueryUpload(request, metadata=(("x-note", "n" * 7_000),))
    for size in (9_000, 100_000):
        with pytest.raises(grpc.RpcError) as raised:
            device.stub.QueryUpload(request, metadata=(("x-note", "n" * size),))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert device.work().decision.verdict == "published"


def test_a_loaded_server_sheds_and_devices_come_back_when_they_are_told_to(
    tmp_path: Path, manifest: Manifest
) -> None:
    limits = replace(DEFAULT_LIMITS, queue_events_max=1)
    gaps: list[tuple[float, float, float]] = []  # earliest, latest, and when the call came again
    with Served(server_config(tmp_path / "data"), manifest, limits) as served:
        assert served.info is not None
        address = served.info.address

        def work(number: int) -> None:
            with GrpcTransport(address, f"device-{number}") as transport:
                heard: list[tuple[float, Overloaded]] = []

                def hear(error: AnabranchError) -> None:
                    if isinstance(error, Overloaded):
                        heard.append((time.monotonic(), error))
                    else:  # a busy machine is slow to connect so many at a time
                        assert isinstance(error, Unavailable)

                def call() -> None:
                    if heard:
                        at, error = heard.pop()
                        assert error.retry_after_s is not None
                        gaps.append((*error.retry_after_s, time.monotonic() - at))
                    transport.query_upload(f"upload-{number}")

                for n in range(CALLS):
                    persist(call, Bell(time.monotonic), n, 60.0, 60.0, hear)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert not any(thread.is_alive() for thread in threads)
    assert gaps, "nobody was shed"
    assert all(0 < earliest <= came for earliest, _, came in gaps)
    assert all(latest < 60.0 for _, latest, _ in gaps)  # its own backing off would take up to a minute


class Slow(MemoryStore):
    """Answers no question of an update until it may; `seen`: what it was asked and given, in turn."""

    def __init__(self) -> None:
        super().__init__(DEFAULT_LIMITS)
        self.seen: list[str] = []
        self.go = threading.Event()

    def receipt(self, update_id: str) -> Receipt | None:
        self.seen.append("device")
        assert self.go.wait(CALL_S)
        return super().receipt(update_id)

    def append(self, entries: Any, *more: Any, **options: Any) -> Any:
        self.seen += [entry.record["kind"] for entry in entries]
        return super().append(entries, *more, **options)


def test_an_order_gets_past_a_crowd_of_devices_that_fills_the_queue(
    tmp_path: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    limits, store = replace(DEFAULT_LIMITS, queue_events_max=4, commit_events_max=1), Slow()
    full, shed = grpc.StatusCode.RESOURCE_EXHAUSTED, threading.Semaphore(0)
    with Served(server_config(tmp_path / "data"), manifest, limits, store) as served, served.admin() as admin:

        def ask(number: int) -> None:
            device = Device(served.channel(), manifest.spec, f"device-{number}")
            request = devices.QueryUploadRequest(client_id=device.client_id, update_id=f"upload-{number}")
            if device.stub.QueryUpload.future(request, timeout=CALL_S).code() is full:
                shed.release()

        crowd = [threading.Thread(target=ask, args=(n,)) for n in range(CALLERS)]
        for thread in crowd:
            thread.start()
        for _ in range(CALLERS - 1 - 4):  # one is being answered
            assert shed.acquire(timeout=CALL_S)
        order = threading.Thread(target=admin.pause)
        order.start()
        while admin.metrics().queue < 4 + 1:
            assert order.is_alive(), "the order was shed as well"
        store.go.set()
        for thread in (order, *crowd):
            thread.join(CALL_S)
        assert admin.status().paused
    assert store.seen == ["device", "paused", *["device"] * 4]
    why = "calls are sent away, to come again: QueryUpload: 4 events are waiting, the queue is full"
    assert [text for text in caplog.messages if "sent away" in text] == [why], "one line for all of them"


def test_calls_that_are_not_begun_are_bounded_and_devices_come_again(
    tmp_path: Path, manifest: Manifest
) -> None:
    limits = replace(DEFAULT_LIMITS, rpcs_waiting_max=4)
    held, go_on, ended = threading.Event(), threading.Event(), threading.Semaphore(0)
    answered: list[int] = []

    def hold() -> None:
        held.set()
        go_on.wait(CALL_S)

    with Served(server_config(tmp_path / "data"), manifest, limits) as served:
        assert served.info is not None
        assert served._loop is not None
        address = served.info.address

        def work(number: int) -> None:
            def heard(error: AnabranchError) -> None:
                if isinstance(error, Unavailable) and "CANCELLED" in str(error):
                    ended.release()

            with GrpcTransport(address, f"device-{number}") as transport:
                call = partial(transport.query_upload, f"upload-{number}")
                answered.append(persist(call, Bell(time.monotonic), number, 0.1, 1.0, heard).received_bytes)

        served._loop.call_soon_threadsafe(hold)  # a server that is busy
        assert held.wait(CALL_S)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(CALLERS)]
        for thread in threads:
            thread.start()
        for _ in range(CALLERS - 4 - 2):  # one waits at the loop's door, and gRPC means "more than"
            assert ended.acquire(timeout=CALL_S)
        go_on.set()
        for thread in threads:
            thread.join(600)
    assert answered == [0] * CALLERS


def test_an_upload_that_is_behind_gives_way_and_goes_on_later(tmp_path: Path, manifest: Manifest) -> None:
    limits = replace(DEFAULT_LIMITS, uploads_inflight_max=1, upload_yields_s=0.0, inline_bytes_max=1000)
    with Served(server_config(tmp_path / "data"), manifest, limits) as served:
        slow, fast = served.device("slow"), served.device("fast")
        task, data = slow.task(), np.ones(manifest.spec.size, np.float32).tobytes()
        begun, over = threading.Event(), threading.Event()

        def first_chunk_and_no_more() -> Iterator[devices.PushUpdateRequest]:
            messages = requests(slow.header(task, data, "slow-1"), chunks(data))
            yield next(messages)
            yield next(messages)
            begun.set()
            over.wait(CALL_S)

        stalled = slow.stub.PushUpdate.future(first_chunk_and_no_more(), timeout=CALL_S)
        assert begun.wait(CALL_S)
        assert fast.work().decision.verdict == "published"
        error: Any = stalled.exception()
        assert (error.code().name, error.details()) == (
            "UNAVAILABLE",
            "the upload came too slowly and was cut: query it and go on",
        )
        over.set()
        received = slow.query("slow-1").received_bytes
        assert received in (0, CHUNK)  # it may have been cut before its first chunk was read
        assert slow.send(task, data, "slow-1", received).decision.verdict == "published"
        assert (served.model() == 2.0).all()


# --- disks ---------------------------------------------------------------------------------------


def watermark(store: Store, free_bytes_min: int) -> None:
    """As if the disk had become full, or empty again."""
    assert isinstance(store, SqlStore)
    store._limits = store._blobs.limits = replace(DEFAULT_LIMITS, free_disk_bytes_min=free_bytes_min)


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "spooled"])
def test_a_full_disk_takes_no_updates_until_there_is_room(
    inline: bool, tmp_path: Path, manifest: Manifest
) -> None:
    limits = replace(DEFAULT_LIMITS, inline_bytes_max=DEFAULT_LIMITS.inline_bytes_max if inline else 1000)
    store = open_store("", tmp_path / "data", limits)
    with Served(server_config(tmp_path / "data"), manifest, limits, store) as served:
        device, other = served.device(), served.device("device-2")
        task = device.task()
        assert other.work().decision.verdict == "published"
        watermark(store, 1 << 60)
        for call in (lambda: device.answer(task, update_id="u-1"), other.ask):
            found = refusal_of(call)
            assert found.kind == ("RESOURCE_EXHAUSTED", "StoreFull")
            assert "once somebody makes room it goes on by itself" in found.details
            assert str(tmp_path) not in found.details
            earliest_s, latest_s = found.retry_after_s
            assert 0 < earliest_s <= latest_s
        assert (served.model() == 1.0).all()  # what is there is served
        watermark(store, 1)
        assert device.answer(task, update_id="u-1").decision.verdict == "published"
        assert other.work().decision.verdict == "published"
        assert (served.model() == 3.0).all()
    assert verify(tmp_path / "data").problems == ()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose data is on a real disk of 64 MiB, in its own view of the file system."""
    (tmp_path / "data").mkdir()
    launcher = own_disk(tmp_path / "data", "64m")
    write_manifest(tmp_path / "model", "disk", {"w": np.zeros((3, 100), np.float32)})
    server = ServerProcess(tmp_path, Plan(), {"free_disk_bytes_min": 8 * MIB}, launcher)
    server.start()
    yield server
    server.kill()


def test_a_disk_that_is_really_full(small_disk: ServerProcess, tmp_path: Path) -> None:
    ballast = Path(f"/proc/{small_disk.pid}/root") / tmp_path.relative_to("/") / "data" / "ballast"
    spec = write_manifest(tmp_path / "model-again", "disk", {"w": np.zeros((3, 100), np.float32)}).spec
    with (
        GrpcTransport(small_disk.address, "device-1") as transport,
        grpc.insecure_channel(small_disk.address, options=QUICK) as channel,
    ):
        device = Device(channel, spec, "device-1")
        device.enrol()
        assert device.work().decision.verdict == "published"
        task = device.task()
        with ballast.open("wb") as file:
            file.write(bytes(60 * MIB - 8192))
        told: list[AnabranchError] = []
        with pytest.raises(grpc.RpcError, match="has no room for it"):
            device.answer(task)

        def room(error: AnabranchError) -> None:
            told.append(error)
            ballast.unlink()

        drop: Callable[[], None] = lambda: transport.drop(task.task_id, "the disk is full")  # noqa: E731
        persist(drop, Bell(time.monotonic), 1, 60.0, 60.0, room)
        assert [type(error) for error in told] == [StoreFull]
        assert device.work().decision.verdict == "published"
        _, data = device.fetch(exact=True)
        assert (np.frombuffer(data, np.float32) == 2.0).all()
    assert small_disk.drain() == 0
