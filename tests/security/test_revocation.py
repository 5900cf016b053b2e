"""A revocation counts at once: on connections and streams that are open, and for uploads under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from guarded import Federation, federation
from streams import stream
from wire import CALL_S, chunks, requests

from anabranch.core.errors import NotAuthenticated
from anabranch.core.limits import MIB
from anabranch.protos.v1 import devices_pb2 as devices

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


def test_an_open_watch_of_a_revoked_operator_shows_nothing_more(guarded: Federation) -> None:
    alice, bob = guarded.operators(guarded.operator("alice")), guarded.operators(guarded.operator("bob"))
    device = guarded.device(guarded.joined("device-1"))
    device.enrol()
    device.work()
    watches = [iter(operator.watch(1)) for operator in (alice, bob)]  # 1: with what happened before
    for watch in watches:
        assert next(watch).client_id == "device-1"
    guarded.authority.revoke("alice")
    device.work()
    with pytest.raises(NotAuthenticated, match="is revoked"):
        list(watches[0])
    assert [e.kind for e in (next(watches[1]) for _ in range(3))]


def test_a_download_under_way_ends_with_the_revocation(tmp_path: Path) -> None:
    tensors = {"w": np.zeros(8 * MIB, np.float32)}  # 32 MiB: much more than is read ahead
    with federation(tmp_path, tensors) as guarded:
        device = guarded.device(guarded.joined("device-1"))
        device.enrol()
        request = devices.FetchModelRequest(client_id="device-1", manifest_sha256=device.manifest_sha256)
        stream = device.stub.FetchModel(request, timeout=CALL_S)
        next(stream)
        guarded.authority.revoke("device-1")
        with pytest.raises(grpc.RpcError) as refused:
            list(stream)
        assert refused.value.code() is UNAUTHENTICATED


def test_an_upload_under_way_is_not_taken_of_a_revoked_device(guarded: Federation) -> None:
    device, revoked = guarded.device(guarded.joined("device-1")), threading.Event()
    device.enrol()
    task, data = device.task(), np.full(8, 3.0, np.float32).tobytes()
    header = device.header(task, data, "update-1")

    def slowly() -> Iterator[devices.PushUpdateRequest]:
        first, *others = requests(header, chunks(data, size=8))
        yield first
        assert revoked.wait(CALL_S)
        yield from others

    push = device.stub.PushUpdate.future(slowly(), timeout=CALL_S)
    guarded.authority.revoke("device-1")
    revoked.set()
    failed: Any = push.exception(CALL_S)
    assert failed.code() is UNAUTHENTICATED
    again = guarded.device(guarded.joined("device-1"))  # with another key: what it has is signed anew
    status = guarded.operators(guarded.operator())
    assert status.status().updates_applied == 0
    assert again.send(task, data, "update-1").decision.verdict == "published"
    assert np.frombuffer(again.fetch()[1], np.float32).tolist() == [3.0] * 8


def test_an_open_exchange_of_a_revoked_device_is_answered_no_more(guarded: Federation) -> None:
    device, other = (guarded.device(guarded.joined(name)) for name in ("device-1", "device-2"))
    device.enrol()
    task, data = device.task(), np.full(8, 3.0, np.float32).tobytes()
    header = device.header(task, data, "update-1")
    beat = devices.HeartbeatRequest(client_id="device-1", task_id=task.task_id)
    with stream(device.channel) as idle, stream(device.channel) as busy, stream(other.channel) as posing:
        idle.say(heartbeat=beat)
        idle.hear()
        busy.say(data[:8], push=header, more=True)
        posing.say(heartbeat=beat)
        assert posing.over() == ("PERMISSION_DENIED", "NotPermitted")
        guarded.authority.revoke("device-1")
        idle.say(heartbeat=beat)
        busy.say(data[8:], offset=8)
        assert [idle.over(), busy.over()] == [("UNAUTHENTICATED", "NotAuthenticated")] * 2
    status = guarded.operators(guarded.operator()).status()
    assert status.version == 0
