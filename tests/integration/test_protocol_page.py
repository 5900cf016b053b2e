"""What docs/protocol.md promises to a client that somebody else writes, tried on a real server."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from refusals import refusal_of
from wire import Device, Served, chunks, requests, server_config

from anabranch.core.limits import Limits
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.manifest import Manifest
from anabranch.server.verify import verify

PIECE = 1000


def values(device: Device, value: float = 1.0) -> bytes:
    """An update's bytes, raw: 400 kB, which is small."""
    return np.full(device.spec.size, value, np.float32).tobytes()


def cut(device: Device, task: devices.Task, data: bytes, stop: int) -> tuple[str, str]:
    """Push up to `stop` bytes of an update, and end the stream."""
    pushed = requests(device.header(task, data, "update-1"), chunks(data[:stop], size=PIECE))
    return refusal_of(lambda: device.stub.PushUpdate(pushed, timeout=600)).kind


def test_a_small_upload_that_ended_too_soon_goes_on_from_where_it_was(served: Served) -> None:
    device = served.device()
    task, data = device.task(), values(device)
    assert cut(device, task, data, 3 * PIECE) == ("INVALID_ARGUMENT", "InvalidUpdate")
    assert device.query("update-1").received_bytes == 3 * PIECE

    gap = refusal_of(lambda: device.send(task, data, "update-1", offset=4 * PIECE))
    assert gap.kind == ("UNAVAILABLE", "Unavailable")

    # An earlier offset is as good: what lies behind it is written again.
    assert device.send(task, data, "update-1", offset=2 * PIECE).status == devices.PUSH_STATUS_ACCEPTED
    assert served.model()[0] == 1.0
    assert device.query("update-1").HasField("verdict")


def test_bytes_of_another_digest_are_forgotten_and_can_be_sent_again(served: Served) -> None:
    device = served.device()
    task, data = device.task(), values(device)
    other = bytes(len(data))  # as many
    pushed = requests(device.header(task, data, "update-1"), chunks(other))
    found = refusal_of(lambda: device.stub.PushUpdate(pushed, timeout=600))
    assert found.kind == ("INVALID_ARGUMENT", "InvalidUpdate")
    assert device.query("update-1").received_bytes == 0
    assert device.send(task, data, "update-1").decision.verdict == "published"


def test_a_second_update_of_a_task_is_of_an_unknown_task(served: Served) -> None:
    device = served.device()
    task, data = device.task(), values(device)
    device.send(task, data, "update-1")
    found = refusal_of(lambda: device.send(task, data, "update-2"))
    assert found.kind == ("NOT_FOUND", "UnknownTask")
    again = device.send(task, data, "update-1")
    assert (again.status, again.version) == (devices.PUSH_STATUS_DUPLICATE, 1)
    assert served.model()[0] == 1.0


@pytest.mark.parametrize("receipts_max", [100_000, 1])
def test_an_id_is_used_once(tmp_path: Path, manifest: Manifest, receipts_max: int) -> None:
    """By whom, of which task and with which bytes: while the receipt is in memory, and after that."""
    limits = Limits(receipts_max=receipts_max)
    with Served(server_config(tmp_path / "data"), manifest, limits) as server:
        device, stranger = server.device(), server.device("device-2")
        task, data = device.task(), values(device)
        device.send(task, data, "update-1")
        device.work()  # with room for one receipt the first is only in the store now
        another, theirs = device.task(), stranger.task()
        taken = ("ALREADY_EXISTS", "IdTaken")
        found = refusal_of(lambda: device.send(task, values(device, 2.0), "update-1"))
        assert found.kind == taken
        assert "'update-1' was decided before, with other bytes" in found.details
        found = refusal_of(lambda: device.send(another, data, "update-1"))
        assert found.kind == taken
        assert "of another task" in found.details
        found = refusal_of(lambda: stranger.send(theirs, data, "update-1"))
        assert found.kind == taken
        assert "of another client and of another task" in found.details
        assert refusal_of(lambda: stranger.query("update-1")).kind == taken
        assert server.model()[0] == 2.0
        # Neither task was used up, and who says the same again is answered as before.
        assert device.send(task, data, "update-1").status == devices.PUSH_STATUS_DUPLICATE
        assert device.send(another, data, "update-2").status == devices.PUSH_STATUS_ACCEPTED
        assert stranger.send(theirs, data, "update-3").status == devices.PUSH_STATUS_ACCEPTED
    if receipts_max > 1:  # `verify` keeps as many as a server does that nobody has told otherwise
        assert verify(tmp_path / "data").problems == ()


def test_an_update_with_a_flaw_is_decided(served: Served) -> None:
    device = served.device()
    task = device.task()
    found = refusal_of(lambda: device.send(task, values(device, np.nan), "update-1"))
    assert found.kind == ("INVALID_ARGUMENT", "InvalidUpdate")
    again = device.send(task, values(device, np.nan), "update-1")
    assert (again.status, again.decision.reason) == (devices.PUSH_STATUS_DUPLICATE, "invalid")


def test_an_ask_repeated_after_its_lease_wants_another_id(tmp_path: Path, manifest: Manifest) -> None:
    leases = {"lease_s": 0.5, "lease_min_s": 0.5}
    with Served(server_config(tmp_path / "data", server=leases), manifest) as server:
        device = server.device()
        first = device.ask("task-1")
        granted = first.task
        again = device.ask("task-1")
        while again.HasField("task"):  # until the lease has run out, which takes half a second
            assert again.task.seed == granted.seed
            assert again.task.expires_at_s == granted.expires_at_s
            again = device.ask("task-1")
        assert again.server_time_s >= granted.expires_at_s
        assert (again.refusal.reason, again.refusal.final) == ("duplicate_task", False)

        late = device.heartbeat("task-1", progress=1.0)  # the lease is not renewed any more
        assert list(late.notices) == []
        assert late.expires_at_s == granted.expires_at_s
        assert device.send(granted, values(device), "update-1").decision.verdict == "published"


def test_a_late_copy_of_an_ask_does_not_end_the_task_under_way(served: Served) -> None:
    """Its device has asked anew since: the first task is given up, and no lease or answer is known of it."""
    device = served.device()
    assert device.ask("task-1").HasField("task")
    task = device.ask("task-2").task
    late = device.ask("task-1")
    assert (late.refusal.reason, late.refusal.final) == ("duplicate_task", False)
    assert device.send(task, values(device), "update-1").decision.verdict == "published"


def test_a_heartbeat_renews_a_lease_by_progress_alone(served: Served) -> None:
    device = served.device()
    task = device.task()
    assert device.heartbeat(task.task_id, progress=0.0).expires_at_s == task.expires_at_s
    renewed = device.heartbeat(task.task_id, progress=1.0)
    assert task.expires_at_s < renewed.expires_at_s <= renewed.server_time_s + task.lease_s
    assert device.heartbeat(task.task_id, progress=1.0).expires_at_s == renewed.expires_at_s
    gone = device.heartbeat("another", progress=1.0)
    assert (gone.expires_at_s, gone.notices[0].kind) == (0.0, devices.NOTICE_KIND_CANCEL)


def test_a_device_that_names_no_stage_gets_raw(tmp_path: Path, manifest: Manifest) -> None:
    uplink = {"codec": "ef(0.9)|topk(0.1)|int8"}
    with Served(server_config(tmp_path / "data", uplink=uplink), manifest) as server:
        assert server.device("none").task().uplink.codec == "raw"
        assert server.device("some", ("topk:1", "int8:1")).task().uplink.codec == "raw"
        able = server.device("all", ("topk:1", "int8:1", "ef:1"))
        task = able.task()
        assert task.uplink.codec == "ef(0.9)|topk(0.1)|int8"
        assert able.send(task, values(able)).decision.verdict == "published"  # raw always counts


def test_the_manifest_is_hashed_as_the_page_writes_it(served: Served) -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    text, digest = page.partition("```json\n")[2].partition("\n```")[0].splitlines()
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == digest
    layout = json.loads(text)
    assert json.dumps(layout) == text
    assert any(
        ord(letter) > 0xFFFF for letter in layout[0][0]
    )  # the example has what other libraries do otherwise
    manifest = served.device().enrol().manifest
    listed = [[tensor.name, list(tensor.shape), tensor.dtype] for tensor in manifest.tensors]
    assert hashlib.sha256(json.dumps(listed).encode()).digest() == manifest.sha256
