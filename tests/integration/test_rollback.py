"""Rollback on a real server: compressed both ways, with parts of a model, while devices train."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from live_server import live_server
from wire import QUICK, Device, Served, Tables, server_config

from anabranch.api.live_result import report_of_data
from anabranch.cli.summary import summary
from anabranch.client.operator import OperatorClient
from anabranch.client.run import ClientOptions, run_client
from anabranch.compress.downloads import SNAPSHOT, apply_download
from anabranch.compress.registry import STAGES
from anabranch.core.errors import DataError, StoreCorrupt
from anabranch.core.model.params import ParamSpec, Vector, digest
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server import writer
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.verify import verify
from anabranch.simulation.replay import replay_run
from anabranch.testing import models as unit_groups
from anabranch.testing.federation import config, first_weights
from anabranch.workloads.synthetic import Synthetic
from anabranch.workloads.trainer import trainer_for

CHAIN = "ef(0.9)|topk(0.1)|int8(64)|gaps|zstd"
LOSSY = {"uplink": {"codec": CHAIN}, "downlink": {"codec": "log(2)"}}
KINDS: dict[str, Tables] = {
    "schedule-free": {
        "strategy": {"name": "fedbuff", "buffer_size": 3, "outer": {"name": "schedule_free"}},
    },
    "compressed": {**LOSSY, "strategy": {"name": "fedbuff", "buffer_size": 1}},
    "robust": {**LOSSY, "strategy": {"name": "fedbuff", "buffer_size": 3}, "robust": {"rule": "median"}},
    "parts": {"strategy": {"name": "asyncdrop"}, "submodel": {"name": "hetero", "coverage_versions": 3}},
    "compressed parts": {
        **LOSSY,
        "strategy": {"name": "asyncdrop"},
        "submodel": {"name": "hetero", "coverage_versions": 3},
    },
}


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """A model with units, and a frozen counter."""
    return write_manifest(tmp_path / "model", "test", unit_groups.tensors(), unit_groups.GROUPS)


def work(device: Device, seed: int, size: float = 0.01) -> devices.PushUpdateResponse:
    """One update of random values."""
    task = device.task()
    part = device.submodel(task)
    count = device.spec.size if part is None else part.size
    delta = size * np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    answer: devices.PushUpdateResponse = device.push(task, delta)
    return answer


def fetched(device: Device, held: tuple[int, Vector] | None) -> tuple[devices.ModelHeader, Vector]:
    """What the device makes of the newest model's payload, its digests checked."""
    more = {} if held is None else {"holds_version": held[0]}
    header, data = device.fetch(codecs=STAGES, **more)
    assert hashlib.sha256(data).digest() == header.part.sha256
    start = header.from_version if header.HasField("from_version") else None
    vector, _ = apply_download(device.spec, header.part.encoding.codec, data, start, held)
    assert not header.vector_sha256 or digest(vector) == header.vector_sha256.hex()
    return header, vector


@pytest.mark.parametrize("kind", KINDS)
def test_devices_go_on_from_a_rollback(kind: str, manifest: Manifest, tmp_path: Path) -> None:
    settings = server_config(tmp_path / "data", **KINDS[kind])
    with Served(settings, manifest) as served:
        good = [served.device(f"good-{i}", STAGES) for i in range(3)]
        bad = served.device("bad", STAGES)
        for i in range(9):
            work(good[i % 3], i)
        with served.admin() as admin:
            to, clean = admin.status().version, served.model()
            work(bad, 100, 50.0)
            for i in range(3):
                work(good[i], 200 + i)
            poisoned = fetched(good[0], None)
            held = (poisoned[0].version, poisoned[1])
            version, left_out = admin.rollback(to, ["bad"])
            assert left_out == 1
        rolled_back = served.model()
        assert 0 < np.abs(rolled_back - clean).max() < 0.2  # of the good ones that came after
        for kept in (None, held, (to, clean)):
            header, vector = fetched(good[0], kept)
            assert header.version == version
            assert header.part.encoding.codec == (
                SNAPSHOT if "compressed" in kind or kind == "robust" else "raw"
            )
            assert vector == pytest.approx(rolled_back, abs=0.01)
        for i in range(6):
            work(good[i % 3], 300 + i)
        model = digest(served.model())
    found = verify(tmp_path / "data")
    assert (found.problems, found.model_sha256) == ((), model)
    with Served(settings, manifest) as again:
        assert digest(again.model()) == model
    assert report_of_data(tmp_path / "data", "", tmp_path / "run").model_sha256 == model
    assert replay_run(tmp_path / "run").matches


def test_everything_after_a_version_can_go(tmp_path: Path, manifest: Manifest) -> None:
    with Served(server_config(tmp_path / "data"), manifest) as served, served.admin() as admin:
        device = served.device()
        for i in range(4):
            work(device, i)
        then = digest(served.model())
        for i in range(3):
            work(device, 10 + i)
        assert admin.rollback(4, [], everyone=True) == (8, 3)
        assert digest(served.model()) == then
        status = admin.status()
        assert status.quarantined == {}
        assert (status.rollbacks, status.updates_left_out, status.updates_applied) == (1, 3, 7)
        assert work(device, 20).decision.verdict == "published"
    assert verify(tmp_path / "data").problems == ()
    told: list[tuple[str, int]] = []
    result = report_of_data(tmp_path / "data", "", tmp_path / "run", tell=lambda *said: told.append(said))
    events = [*range(1, verify(tmp_path / "data").events + 1)]
    assert told == [*(("copying its log", seq) for seq in events), *(("replaying it", seq) for seq in events)]
    assert (result.updates_applied, result.updates_left_out) == (8, 3)
    assert "8 updates, 3 of them left out by rollbacks, 0 rejected" in summary(result, None)
    assert "3 left out by rollbacks" in (tmp_path / "run" / "report.html").read_text()
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    (back,) = [event for line in lines if (event := json.loads(line))["kind"] == "rolled_back"]
    assert (back["version"], back["to_version"], back["updates_left_out"]) == (8, 4, 3)


# --- payloads that are gone ---------------------------------------------------------------------------


def test_a_payload_that_is_gone_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    values = {"w": np.zeros((300, 1000), np.float32)}  # 1.2 MB: not inline
    manifest = write_manifest(tmp_path / "model", "test", values)
    with Served(server_config(tmp_path / "data"), manifest) as served, served.admin() as admin:
        device, bad = served.device(), served.device("bad")
        device.work(1.0)
        bad.work(5.0)
        (first,) = [p for p in (tmp_path / "data" / "blobs").rglob("*") if p.is_file() and _value(p) == 1.0]
        first.rename(tmp_path / "aside")
        with pytest.raises(StoreCorrupt, match=r"event \d+: .* is gone: payload .* restore a backup"):
            admin.rollback(0, ["bad"])
        assert (admin.status().quarantined, admin.status().version) == ({}, 2)
        assert device.work(1.0).decision.verdict == "published"
        (tmp_path / "aside").rename(first)
        assert admin.rollback(0, ["bad"]) == (4, 1)
        assert (served.model() == 2.0).all()


def _value(path: Path) -> float:
    return float(np.frombuffer(path.read_bytes(), np.float32)[0])


def test_a_run_without_payloads_says_that_it_cannot_be_replayed(tmp_path: Path, manifest: Manifest) -> None:
    settings = server_config(tmp_path / "data", run={"keep_payloads": False})
    with Served(settings, manifest) as served, served.admin() as admin:
        work(served.device("bad"), 1)
        admin.rollback(0, ["bad"])
    assert verify(tmp_path / "data").problems == (), "the server keeps them all the same"
    with pytest.raises(DataError, match=r"run\.keep_payloads"):
        report_of_data(tmp_path / "data", "", tmp_path / "run")


# --- devices at work -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fedasync", "teasq"])
def test_devices_train_on_through_a_rollback(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "FOLDED_AT_ONCE", 1)  # so that there is much in between
    tasks, enough, back = 10, threading.Event(), threading.Event()
    params: dict[str, Any] = {} if strategy == "fedasync" else {"cache_size": 2, "concurrency_fraction": 1.0}
    settings = config(strategy={"name": strategy, **params})
    answered: dict[str, int] = {}

    def train(name: str, address: str) -> None:
        pushed = 0

        def hear(kind: str, **_: Any) -> None:
            nonlocal pushed
            pushed += kind == "pushed"
            if (name, pushed, kind) == ("a", tasks // 2, "pushed"):
                enough.set()
                assert back.wait(600)  # with a part of its work to come; the other device trains on

        options = ClientOptions("synthetic", address, name, state_dir=tmp_path / name, tasks_max=tasks)
        answered[name] = run_client(options, hear).answered

    groups = trainer_for(Synthetic()).spec.groups
    with live_server(tmp_path, first_weights(), settings, groups=groups) as info:
        threads = [threading.Thread(target=train, args=(name, info.address)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        assert enough.wait(600)
        with (
            grpc.insecure_channel(info.address, options=QUICK) as channel,
            OperatorClient(info.admin_address) as admin,
        ):
            bad = Device(channel, ParamSpec.of(first_weights(), groups), "bad", STAGES)
            bad.enrol()
            to = admin.status().version
            work(bad, 1, 100.0)
            version, _ = admin.rollback(to, ["bad"])
            back.set()
            for thread in threads:
                thread.join(600)
            assert set(admin.status().quarantined) == {"bad"}
            assert admin.status().version > version
    assert answered == {"a": tasks, "b": tasks}
    found = verify(tmp_path / "data")
    assert found.problems == ()
