"""What is left of uploads that are cut: bounded by task and by client, and gone with the task."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from refusals import refusal_of
from server_process import Plan, ServerProcess
from small_disks import kept_disk
from waits import until
from wire import QUICK, Device, Served, chunks, requests, server_config

from anabranch.core.limits import DEFAULT_LIMITS, MIB
from anabranch.core.model.arrays import Array, lasting
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.spool import Spool, UploadKey
from anabranch.server.verify import verify

SPOOLED = replace(DEFAULT_LIMITS, inline_bytes_max=1000)  # what is larger is a file from its first byte on
CUTS = 134
ANSWER_S = 60.0


def values(device: Device, value: float = 1.0) -> bytes:
    """An update's bytes, raw."""
    return np.full(device.spec.size, value, np.float32).tobytes()


def cut(device: Device, task: devices.Task, update_id: str) -> None:
    """Push an update but for its last byte, and end the stream."""
    data = values(device)
    header = device.header(task, data, update_id)
    with pytest.raises(grpc.RpcError, match="bytes declared"):
        device.stub.PushUpdate(requests(header, chunks(data[:-1])), timeout=ANSWER_S)


def parts(folder: Path) -> list[str]:
    """The names in the spool."""
    return sorted(path.name for path in (folder / "spool").iterdir())


@pytest.fixture
def spooling(tmp_path: Path, manifest: Manifest) -> Any:
    with Served(server_config(tmp_path / "data"), manifest, SPOOLED) as server:
        yield server


def test_a_task_has_one_part(spooling: Served, tmp_path: Path) -> None:
    device = spooling.device()
    task = device.task()
    for number in range(5):
        cut(device, task, f"update-{number}")
        until(lambda: len(parts(tmp_path / "data")) == 1)
    assert parts(tmp_path / "data") == [f"device-1+{task.task_id}+update-4.part"]
    assert device.query("update-3").received_bytes == 0
    size = device.query("update-4").received_bytes
    assert size == 4 * device.spec.size - 1
    assert device.send(task, values(device), "update-4", size).decision.verdict == "published"
    until(lambda: parts(tmp_path / "data") == [])


@pytest.mark.parametrize("end", ["answered", "given back", "superseded", "finished"])
def test_a_part_goes_with_its_task(
    end: str, tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = {"versions_max": 1} if end == "finished" else {}
    if end == "finished":  # found by a look through the spool, now and then
        monkeypatch.setattr("anabranch.server.app.SWEEP_S", 0.05)
    with Served(server_config(tmp_path / "data", run=budget), manifest, SPOOLED) as server:
        device, other = server.device(), server.device("device-2")
        task = device.task()
        cut(device, task, "update-1")
        assert len(parts(tmp_path / "data")) == 1
        match end:
            case "answered":  # by another update, of which nothing is a file
                device.send(task, values(device), "update-2")
            case "given back":
                device.stub.DropTask(devices.DropTaskRequest(client_id="device-1", task_id=task.task_id))
            case "superseded":
                device.task()
            case "finished":
                other.work()
        until(lambda: parts(tmp_path / "data") == [])


def test_a_part_outlives_a_restart_as_long_as_its_task(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data")
    with Served(config, manifest, SPOOLED) as server:
        device = server.device()
        task = device.task()
        cut(device, task, "update-1")
    part = tmp_path / "data" / "spool" / f"device-1+{task.task_id}+update-1.part"
    os.utime(part, (1.0, 1.0))  # the clock was set forward by years since
    (tmp_path / "data" / "spool" / "update-of-an-older-release.part").write_bytes(b"x")
    (tmp_path / "data" / "spool" / "device-1+no-such-task+update-2.part").write_bytes(b"x")
    with Served(config, manifest, SPOOLED) as server:
        assert parts(tmp_path / "data") == [f"device-1+{task.task_id}+update-1.part"]
        device = server.device()
        here = device.query("update-1").received_bytes
        assert here == 4 * device.spec.size - 1
        assert device.send(task, values(device), "update-1", here).decision.verdict == "published"


@pytest.mark.parametrize("again_bytes", [0, 8])
def test_of_a_whole_upload_a_device_sends_no_chunk_or_goes_on_from_before_its_end(
    again_bytes: int, tmp_path: Path, manifest: Manifest
) -> None:
    """The server was killed when it had checked the upload, before the payload had its name."""
    config = server_config(tmp_path / "data")
    with Served(config, manifest, SPOOLED) as server:
        device = server.device()
        task, data = device.task(), values(device)
    (tmp_path / "data" / "spool" / f"device-1+{task.task_id}+update-1.whole").write_bytes(data)
    with Served(config, manifest, SPOOLED) as server:
        device = server.device()
        assert device.query("update-1").received_bytes == len(data)
        answer = device.send(task, data, "update-1", len(data) - again_bytes)
        assert answer.decision.verdict == "published"
        assert (server.model() == 1.0).all()


def test_two_devices_may_have_uploads_of_one_id(spooling: Served) -> None:
    one, two = spooling.device(), spooling.device("device-2")
    theirs = one.task(), two.task()
    cut(one, theirs[0], "update-1")
    assert two.query("update-1").received_bytes == 0
    cut(two, theirs[1], "update-1")
    assert one.query("update-1").received_bytes == two.query("update-1").received_bytes > 0


def test_a_small_update_leaves_no_file(served: Served, tmp_path: Path) -> None:
    device = served.device()
    task, data = device.task(), values(device)
    cut(device, task, "update-1")
    assert parts(tmp_path / "data") == []
    here = device.query("update-1").received_bytes
    assert here == len(data) - 1
    assert device.send(task, data, "update-1", here).decision.verdict == "published"
    assert parts(tmp_path / "data") == []
    task = device.task()
    cut(device, task, "update-2")
    device.task()  # what is in memory goes with its task, too
    assert device.query("update-2").received_bytes == 0


def test_small_updates_for_which_memory_has_no_room_are_files_until_they_are_decided(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.server.uploads.HELD_BYTES_MAX", 0)
    with Served(server_config(tmp_path / "data"), manifest) as server:
        device = server.device()
        task, data = device.task(), values(device)
        cut(device, task, "update-1")
        assert parts(tmp_path / "data") == [f"device-1+{task.task_id}+update-1.part"]
        here = device.query("update-1").received_bytes
        assert here == len(data) - 1
        assert device.send(task, data, "update-1", here).decision.verdict == "published"
        assert device.work().decision.verdict == "published"
        assert (server.model() == 2.0).all()
        until(lambda: parts(tmp_path / "data") == [])
    assert verify(tmp_path / "data").problems == ()


def test_of_small_parts_the_oldest_go_where_memory_has_no_room_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anabranch.server.spool.SMALL_BYTES_MAX", 250)
    spool = Spool(10**6)

    def kept() -> dict[str, int]:
        return {part.key.client_id: len(part.data) for part in spool}

    a, b, c, d = (spool.enter(UploadKey(client, "t", "u"))[0] for client in "abcd")
    for part in (a, b):
        spool.keep(part, bytes(100))
    spool.keep(a, bytes(150))  # more of it has come
    assert kept() == {"a": 150, "b": 100, "c": 0, "d": 0}
    spool.keep(c, bytes(50))
    assert kept() == {"a": 150, "c": 50, "d": 0}, "the oldest is no part any more"
    spool.remove(a)
    spool.keep(d, bytes(200))
    assert kept() == {"c": 50, "d": 200}
    spool.keep(d, b"")
    spool.keep(c, bytes(250))
    assert kept() == {"c": 250, "d": 0}


def test_a_client_has_its_quota(tmp_path: Path, manifest: Manifest) -> None:
    size = 400_000
    table = {"tasks_per_client": 3, "upload_bytes_per_client": 2 * size}
    with Served(server_config(tmp_path / "data", server=table), manifest, SPOOLED) as server:
        device, other = server.device(), server.device("device-2")
        first, second, third = device.task(), device.task(), device.task()
        cut(device, first, "update-1")
        cut(device, second, "update-2")
        found = refusal_of(lambda: device.send(third, values(device), "update-3"))
        assert found.kind == ("RESOURCE_EXHAUSTED", "Overloaded")
        assert "over server.upload_bytes_per_client, 800000" in found.details
        assert found.retry_after_s
        assert other.work().decision.verdict == "published"  # it is nobody else's
        assert device.send(first, values(device), "update-1").decision.verdict == "published"
        assert device.send(third, values(device), "update-3").decision.verdict == "published"
    table = {"upload_bytes_per_client": size - 1}
    with Served(server_config(tmp_path / "more", server=table), manifest, SPOOLED) as server:
        device = server.device()
        with pytest.raises(grpc.RpcError, match="an update of 400000 bytes is over"):
            device.work()


def test_cut_uploads_do_not_fill_a_disk_and_a_full_one_is_started_on(tmp_path: Path) -> None:
    """One device cuts as many uploads as it can; then the disk is full to the last byte of such parts."""
    (tmp_path / "data").mkdir()
    spec = write_manifest(tmp_path / "model", "disk", {"w": np.zeros((5, 100_000), np.float32)}).spec
    with kept_disk(tmp_path / "data", "64m") as (launcher, data):
        limits = {"free_disk_bytes_min": 8 * MIB, "early_calls_at_once": CUTS}  # nothing is answered late
        server = ServerProcess(tmp_path, Plan(), limits, launcher)
        server.start()
        with grpc.insecure_channel(server.address, options=QUICK) as channel:
            hostile, honest = Device(channel, spec, "hostile"), Device(channel, spec, "honest")
            hostile.enrol()
            honest.enrol()
            task = hostile.task()
            for number in range(CUTS):
                cut(hostile, task, f"update-{number}")
            assert len(parts(data)) <= 2  # the one before the last may be about to go
            assert honest.work().decision.verdict == "published"
            until(lambda: len(parts(data)) == 1)
            server.kill()
            fill(data / "spool")
            server.start()
            assert parts(data) == []
            assert honest.work().decision.verdict == "published"
        assert server.drain() == 0


def fill(folder: Path) -> None:
    """Put parts of other tasks in a folder until there is not a byte left on its disk."""
    for number in range(1000):
        try:
            (folder / f"gone+task-{number}+update.part").write_bytes(bytes(2 * MIB))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return
    raise AssertionError("this disk is too large")


@pytest.mark.parametrize(
    ("rule", "spooled", "copies"),
    [("median", True, ["upload"]), ("median", False, ["writer"]), ("none", True, [])],
)
def test_what_a_strategy_keeps_of_a_large_update_is_copied_before_the_writer_has_it(
    rule: str,
    spooled: bool,
    copies: list[str],
    tmp_path: Path,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[str] = []

    def watched(array: Array) -> Array:
        kept = lasting(array)
        if kept is not array:
            in_writer = threading.current_thread().name.startswith("anabranch-writer")
            found.append("writer" if in_writer else "upload")
        return kept

    monkeypatch.setattr("anabranch.core.model.params.lasting", watched)
    strategy = {"name": "fedbuff", "buffer_size": 3}
    config = server_config(tmp_path / "data", strategy=strategy, robust={"rule": rule})
    with Served(config, manifest, SPOOLED if spooled else None) as server:
        server.device().work()
    assert found == copies
