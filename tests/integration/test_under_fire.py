"""A server process under fire: it lives, serves honest devices, and bounds its memory and its log."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from fire import RECEIPT_BYTES, Healthy, Peak, Stalled, Target, target
from wire import CALL_S, QUICK, Device

from anabranch.core.limits import MIB
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model

Figure = Callable[[str], None]

# What gRPC keeps of connections and what Python keeps of strangers that were let in; nothing grows with time.
GROWN_MIB_MAX = 64.0
# Whatever is malformed is the sender's fault, and the status says so.
FAULT_OF_THE_SENDER = {
    "OK",  # a mutation may be harmless
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "RESOURCE_EXHAUSTED",  # over the size of a message
    "CUT_OFF",
}
STALLED = 200
REST_S = 0.05  # of honest devices after each task: what they want of the machine is not the question here


def malformed(server: Target, messages: int, seed: int, figure: Figure, rest_s: float = 0.0) -> None:
    with Peak(server) as peak, Healthy(server, 2, rest_s) as healthy:
        began = time.monotonic()
        found = server.attack(messages, seed)
        took_s = time.monotonic() - began
        while healthy.applied <= 10 and not healthy.problems:  # whoever starves is waited for in vain
            time.sleep(0.05)
    figure(
        f"{messages} malformed messages of {len(found.kinds)} kinds in {took_s:.0f} s: memory grew by "
        f"{peak.grown_mib:.0f} MiB, {healthy.applied} healthy updates, "
        f"median {1000 * healthy.quantile_s(0.5):.0f} ms, p99 {1000 * healthy.quantile_s(0.99):.0f} ms"
    )
    assert server.is_alive
    assert healthy.problems == []
    assert set(found.statuses) <= FAULT_OF_THE_SENDER, found.samples
    assert sum(found.statuses.values()) > 0.9 * messages
    assert peak.grown_mib < GROWN_MIB_MAX + RECEIPT_BYTES * healthy.applied / MIB
    assert "Traceback" not in server.log
    # The chronicle has a line a second, of the honest ones.
    said = [line for line in server.log.splitlines() if "anabranch.server.chronicle" not in line]
    assert sum(map(len, said)) < 10_000 + messages
    server.close(healthy.applied)


def test_malformed_messages_harm_nobody_but_their_sender(tmp_path: Path, figure: Figure) -> None:
    with target(tmp_path, 300) as server:
        malformed(server, 1_000, 1, figure, REST_S)


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_malformed_messages(tmp_path: Path, figure: Figure) -> None:
    with target(tmp_path, 300) as server:
        malformed(server, 100_000, 2, figure)


def stalled(server: Target, uploads: int, lasts_s: float, figure: Figure, rest_s: float = 0.0) -> None:
    """Many devices stall at 90 % of 3.9 MB, again and again; honest ones with updates as large go on."""
    server_s = time.monotonic()
    with Healthy(server, 2) as warm:
        while warm.applied < 4:
            time.sleep(0.05)
    with Peak(server) as peak, Stalled(server, uploads, 0.9) as attack:
        while attack.begun < uploads // 4:
            time.sleep(0.05)
        with Healthy(server, 2, rest_s) as healthy:
            time.sleep(lasts_s)
            while healthy.applied < 4 and not healthy.problems:  # whoever starves is waited for in vain
                time.sleep(0.05)
    figure(
        f"{uploads} stalled uploads for {time.monotonic() - server_s:.0f} s: memory grew by "
        f"{peak.grown_mib:.0f} MiB, {attack.begun} were begun and came to {dict(attack.statuses)}, "
        f"{healthy.applied} healthy updates of 3.9 MB, {healthy.waits} of them waited for a place"
    )
    assert server.is_alive
    assert healthy.problems == []
    assert peak.grown_mib < GROWN_MIB_MAX
    assert {"RESOURCE_EXHAUSTED", "UNAVAILABLE"} <= set(attack.statuses)
    server.close(warm.applied + healthy.applied)


def test_stalled_uploads_give_way(tmp_path: Path, figure: Figure) -> None:
    limits = {"upload_idle_s": 6.0, "upload_yields_s": 1.0, "uploads_inflight_max": 12}
    with target(tmp_path, 975_000, limits) as server:  # a quarter of the places, and of those who want them
        stalled(server, STALLED // 4, 8.0, figure, REST_S)


def test_a_few_bytes_are_no_more_than_they_name(tmp_path: Path) -> None:
    """A run of all coordinates is a few bytes, and sixteen megabytes of numbers."""
    size, unread = 2_000_000, 12
    whole = model.SubmodelMap(starts=[0], lengths=[size])
    with target(tmp_path, size) as server, grpc.insecure_channel(server.address, QUICK) as channel:
        device = Device(channel, server.spec)
        device.enrol()
        task = device.task()
        device.fetch(version=0)
        disk_bytes = server.disk_bytes
        with Peak(server) as peak:
            request = devices.FetchModelRequest(
                client_id=device.client_id, manifest_sha256=device.manifest_sha256, submodel=whole
            )
            fetches = [device.stub.FetchModel(request, timeout=CALL_S) for _ in range(unread)]
            for fetch in fetches:
                next(fetch)
            with pytest.raises(grpc.RpcError, match="send the task's own map"):
                device.send(task, bytes(4 * size), submodel=whole)
            for fetch in fetches:
                fetch.cancel()
        assert peak.grown_mib < GROWN_MIB_MAX
        assert server.disk_bytes < disk_bytes + MIB
        server.close(0)


@pytest.mark.prove
def test_two_hundred_stalled_uploads_at_the_limits_that_are_served(tmp_path: Path, figure: Figure) -> None:
    with target(tmp_path, 975_000) as server:
        stalled(server, STALLED, 70.0, figure)
