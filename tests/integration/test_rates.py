"""How often one client may call, and how much of that the log has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from refusals import refusal_of
from server_logs import records_of
from wire import CALL_S, UNHELD, Device, Served, server_config

from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.protos.convert import PROTOCOL_VERSION
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.server.manifest import Manifest, write_manifest

AT_ONCE = 20


@pytest.fixture
def small(tmp_path: Path) -> Manifest:
    """A model of four values."""
    return write_manifest(tmp_path / "small", "test", {"w": np.zeros(4, np.float32)})


def refused(call: Callable[[], Any]) -> tuple[float, float]:
    """The window of a call that is refused for now."""
    found = refusal_of(call)
    assert found.kind == ("RESOURCE_EXHAUSTED", "Overloaded")
    earliest, latest = found.retry_after_s
    return earliest, latest


def enrol(device: Device, examples: int) -> Any:
    request = devices.EnrolRequest(
        client_id=device.client_id,
        protocol_version=PROTOCOL_VERSION,
        capability=devices.Capability(examples=examples, codecs=["raw"]),
    )
    return device.stub.Enrol(request, timeout=CALL_S)


def pushes(device: Device) -> Callable[[], Any]:
    """The same update again and again: a repeated one counts as a call as well."""
    task, delta = device.task(), np.ones(4, np.float32)
    return lambda: device.push(task, delta, "update-1")


CALLS: dict[str, Callable[[Device], Callable[[], Any]]] = {
    "Enrol": lambda device: device.enrol,
    "AskTask": lambda device: lambda: device.ask("task-1"),
    "FetchModel": lambda device: device.fetch,
    "PushUpdate": pushes,
    "QueryUpload": lambda device: lambda: device.query("update-1"),
    "Heartbeat": lambda device: lambda: device.heartbeat("task-1"),
    "DropTask": lambda device: (
        lambda: device.stub.DropTask(
            devices.DropTaskRequest(client_id=device.client_id, task_id="task-1"), timeout=CALL_S
        )
    ),
    "GetLinks": lambda device: (
        lambda: device.stub.GetLinks(devices.GetLinksRequest(after_version=0, to_version=1), timeout=CALL_S)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_client_that_calls_without_end_is_told_to_wait(name: str, tmp_path: Path, small: Manifest) -> None:
    # So few a minute that no machine is slow enough for another one to come.
    limits: Limits = replace(DEFAULT_LIMITS, calls_per_minute=float(AT_ONCE))
    with Served(server_config(tmp_path / "data"), small, limits) as served:
        device, honest = served.device("device-1"), served.device("device-2")
        call = CALLS[name](device)
        for _ in range(100 * AT_ONCE):
            try:
                call()
            except grpc.RpcError:
                break
        earliest, latest = refused(call)
        assert 0.5 <= earliest < latest <= 12.0
        assert honest.work().decision.verdict == "published"  # nobody else is held up by it


def test_alternating_capabilities_fill_no_log(tmp_path: Path, small: Manifest) -> None:
    with Served(server_config(tmp_path / "data"), small, UNHELD) as served:
        device = served.device()
        outcomes = []
        for number in range(100):
            try:
                enrol(device, 1 + number % 2)
                outcomes.append("taken")
            except grpc.RpcError:
                outcomes.append("refused")
        refused(lambda: enrol(device, 77))
        assert served.device("device-2").work().decision.verdict == "published"
    written = [r for r in records_of(tmp_path / "data", kind="enrolled") if r["client_id"] == "device-1"]
    # The first one, as many as come at once, and the one that is due each five minutes of a slow machine.
    assert len(written) <= 2 + DEFAULT_LIMITS.capabilities_per_hour
    assert outcomes.count("refused") > 30  # those of the capability on record change nothing, and are taken


def test_heartbeats_at_every_moment_fill_no_log(tmp_path: Path, small: Manifest) -> None:
    server = {"lease_s": 36_000.0, "lease_max_s": 36_000.0}
    with Served(server_config(tmp_path / "data", server=server), small, UNHELD) as served:
        device = served.device()
        task = device.task()
        beats = [device.heartbeat(task.task_id, float(1 + n)) for n in range(100)]
        assert {beat.expires_at_s for beat in beats} == {beats[0].expires_at_s}
    assert [record["progress"] for record in records_of(tmp_path / "data", kind="renewed")] == [1.0]


def flawed(device: Device) -> Any:
    """A push that is refused: there is no such task."""
    with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
        device.push(devices.Task(task_id="none"), np.ones(4, np.float32), codec="raw")


def beaten(device: Device) -> Any:
    """A heartbeat of the task in hand."""
    return device.heartbeat("task-1")


# What comes early the third time at the latest, by whom it is done, and the least seconds between.
EARLY: dict[str, tuple[Callable[[Device], Any], str, float]] = {
    "an enrolment": (Device.enrol, "device-1", 1.0),
    "an ask that gives a task up": (Device.ask, "device-1", 1.0),
    "an ask inside its wait": (Device.ask, "device-2", 0.7),
    "a push behind one that was refused": (flawed, "device-1", 1.0),
    "a heartbeat that renews nothing": (beaten, "device-1", 0.5),
}


@pytest.mark.parametrize("what", EARLY)
def test_who_calls_early_again_and_again_has_its_answers_late(
    what: str, tmp_path: Path, small: Manifest
) -> None:
    call, who, wait_s = EARLY[what]
    server = {"concurrency": 1, "lease_s": 5.0, "retry_after_min_s": 0.7}
    limits = replace(DEFAULT_LIMITS, early_calls_at_once=0)
    with Served(server_config(tmp_path / "data", server=server), small, limits) as served:
        fleet = {name: served.device(name) for name in ("device-1", "device-2")}
        assert fleet["device-1"].ask("task-1").HasField("task")
        began = time.monotonic()
        for _ in range(3):
            call(fleet[who])
        assert time.monotonic() - began >= wait_s


def test_pausing_what_is_paused_is_not_logged(tmp_path: Path, small: Manifest) -> None:
    with Served(server_config(tmp_path / "data"), small) as served:
        operator = served.operator()
        for _ in range(3):
            operator.Resume(operators.ResumeRequest())
            operator.Pause(operators.PauseRequest())
            operator.Pause(operators.PauseRequest())
        operator.Resume(operators.ResumeRequest())
    assert len(records_of(tmp_path / "data", kind="paused")) == 3
    assert len(records_of(tmp_path / "data", kind="resumed")) == 3


def test_long_reasons_fill_no_log(tmp_path: Path, small: Manifest) -> None:
    with Served(server_config(tmp_path / "data"), small) as served, served.admin() as admin:
        device, why = served.device("device-1"), "z" * 10_000
        drop = devices.DropTaskRequest(client_id="device-1", task_id=device.task().task_id, why=why)
        device.stub.DropTask(drop, timeout=CALL_S)
        admin.quarantine("device-1", why)
    reasons = [record["why"] for record in records_of(tmp_path / "data") if "why" in record]
    assert reasons == ["z" * 200] * 2
