"""Updates without numbers at a real server: who is put away, and when the run is given up."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from wire import UNHELD, Device, Served, server_config

from anabranch.api.cockpit_live import ServedRun
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.server.manifest import Manifest
from anabranch.server.store.base import RunInfo
from anabranch.server.store.factory import open_store
from anabranch.server.verify import verify


def no_numbers(device: Device) -> None:
    """Ask, and answer with an update that cannot be used."""
    with pytest.raises(grpc.RpcError) as refused:
        device.answer(device.task(), float("nan"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_run_that_is_given_up_says_why_and_is_still_served(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data", run={"rejections_max": 4})
    with Served(config, manifest) as served:
        one, other = served.device("one"), served.device("other")
        assert one.work().decision.verdict == "published"
        for device in (one, other, one):
            no_numbers(device)
        request = devices.DropTaskRequest(
            client_id="other", task_id=other.task().task_id, why="the loss is NaN", diverged=True
        )
        other.stub.DropTask(request)
        refusal = one.ask().refusal
        why = (
            "the last 4 updates were all rejected (the loss is NaN): "
            "learning rate too large, or NaN in the data?"
        )
        assert (refusal.final, refusal.detail) == (True, why)
        status = served.operator().GetStatus(operators.GetStatusRequest())
        assert (status.finished, status.version, status.updates_rejected) == (why, 1, 3)
        assert (served.model() == 1.0).all(), "the last version is there for whoever wants it"
        with served.admin() as operator:
            head = ServedRun(operator).head()
        assert (head.state, head.given_up, head.why) == ("finished", True, why), "as the cockpit has it"
    with Served(config, manifest) as served:
        status = served.operator().GetStatus(operators.GetStatusRequest())
        assert (status.finished, status.version) == (why, 1), "a restart comes to the same end"
    assert verify(tmp_path / "data").problems == ()


def test_one_hostile_device_is_put_away_by_default(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data")
    with Served(config, manifest) as served:
        hostile, slow = served.device("hostile"), served.device("slow")
        under_way = slow.task()
        for _ in range(config.robust.flaws_max):
            no_numbers(hostile)
        assert hostile.ask().refusal.reason == "quarantined"
        assert slow.answer(under_way).decision.verdict == "published"
        with served.admin() as operator:
            assert not ServedRun(operator).head().given_up
        assert not served.operator().GetStatus(operators.GetStatusRequest()).finished


def test_a_run_of_an_older_release_goes_on_as_it_was_started(tmp_path: Path, manifest: Manifest) -> None:
    """It knew no `rejections_max`, and its `flaws_max` was off: nobody need write that down to go on."""
    today = server_config(tmp_path / "data")
    before = today.to_json()
    del before["run"]["rejections_max"]
    before["robust"]["flaws_max"] = 0
    store = open_store("", tmp_path / "data")
    store.start(RunInfo("run-1", "run", before, manifest.spec.to_json(), manifest.initial_sha256, 0.0))
    store.close()
    with Served(today, manifest, UNHELD) as served:
        device = served.device()
        for _ in range(today.run.rejections_max + 1):
            no_numbers(device)
        assert device.work().decision.verdict == "published"
        assert not device.ask().refusal.reason
    found = verify(tmp_path / "data")
    assert (found.problems, found.version) == ((), 1)
