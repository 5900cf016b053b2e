"""Devices, followers and operators against the real server on loopback; devices die and come back."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import live_server
from ports import free_port
from safetensors.numpy import load_file
from telling_device import device, told

from anabranch.client.follower import Follower, Measurement
from anabranch.client.operator import OperatorClient
from anabranch.client.outbox import Outbox
from anabranch.client.run import ClientOptions, FollowerOptions, follow, run_client
from anabranch.client.summary import AgentSummary
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import Unavailable, UnknownVersion
from anabranch.core.model.params import digest
from anabranch.core.rng import stream
from anabranch.testing.federation import config, first_weights
from anabranch.workloads.app import Shard
from anabranch.workloads.synthetic import Synthetic

A: dict[str, Any] = {"client_id": "a"}


@pytest.mark.parametrize("moment", ["trained", "pushed"])
def test_a_killed_device_goes_on_from_its_outbox(moment: str, tmp_path: Path) -> None:
    with live_server(tmp_path, first_weights(), config()) as info:
        assert told(device(info.address, tmp_path / "a", moment, 3, **A))[-1]["kind"] == moment
        (held,) = Outbox(tmp_path / "a" / "outbox").pending()
        second = told(device(info.address, tmp_path / "a", tasks_max=2, **A))
        pushed = [e for e in second if e["kind"] == "pushed"]
        with OperatorClient(info.admin_address) as operator:
            status = operator.status()
    assert pushed[0]["update"] == held
    assert len(pushed) == 2
    assert (status.updates_applied, status.version) == (4, 4)
    assert pushed[0]["duplicate"] == (moment == "pushed")


TEASQ = {"name": "teasq", "cache_size": 1, "concurrency_fraction": 1.0, "kept": 0.25, "decay_every": 0}


@pytest.mark.parametrize("moment", ["trained", "pushed"])
def test_a_killed_device_keeps_its_residual(moment: str, tmp_path: Path) -> None:
    """TEASQ over the wire: compressed both ways; killed with a memory pending, or just committed."""
    memory = tmp_path / "a" / "memory"
    with live_server(tmp_path, first_weights(), config(strategy=TEASQ)) as info:
        first = told(device(info.address, tmp_path / "a", moment, 3, **A))
        assert first[-1]["kind"] == moment
        (held,) = Outbox(tmp_path / "a" / "outbox").pending()
        pending = memory / f"pending-{held}.safetensors"
        assert pending.exists() == (moment == "trained")
        residual = (pending if moment == "trained" else memory / "kept.safetensors").read_bytes()
        # The same device, which only sends what it has: what was pending then counts, to the bit.
        assert told(device(info.address, tmp_path / "a", tasks_max=1, **A))[-1]["kind"] == "summary"
        assert [p.name for p in memory.iterdir()] == ["kept.safetensors"]
        assert (memory / "kept.safetensors").read_bytes() == residual
        third = told(device(info.address, tmp_path / "a", tasks_max=2, **A))
        with OperatorClient(info.admin_address) as operator:
            status = operator.status()
    before, after = ([e for e in life if e["kind"] == "fetched"] for life in (first, third))
    assert before[0]["from_version"] is None
    assert after[0]["from_version"] == before[-1]["version"], "a restart costs no snapshot"
    assert (status.updates_applied, status.updates_rejected) == (5, 0)
    assert status.uplink_bytes < status.uplink_bytes_raw
    assert status.downlink_bytes < status.downlink_bytes_full_equivalent
    assert (memory / "kept.safetensors").read_bytes() != residual


def test_sigterm_ends_a_device_in_the_midst_of_training(tmp_path: Path) -> None:
    endless = config(client={"steps": 10**9})
    with live_server(tmp_path, first_weights(), endless) as info:
        process = device(info.address, tmp_path / "a", **A)
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["kind"] == "fetched":
                break
        process.terminate()
        rest = told(process)
        with OperatorClient(info.admin_address) as operator:
            status = operator.status()
    assert rest[-1] == {"kind": "summary", "why": "SIGTERM", "answered": 0}
    assert (status.live_tasks, status.leases_lost) == (0, 1)


def test_a_device_outlives_a_restart_of_its_server(tmp_path: Path) -> None:
    settings = config(run={"versions_max": 6}, client={"steps": 3})
    reached, summaries = threading.Event(), []

    def hear(kind: str, **data: Any) -> None:
        if kind == "pushed" and data["version"] == 3:
            reached.set()
            assert restarted.wait(600)

    def work(address: str) -> None:
        options = ClientOptions(
            "synthetic", address, "a", state_dir=tmp_path / "a", retry_base_s=0.05, retry_cap_s=0.2
        )
        summaries.append(run_client(options, hear))

    restarted, port = threading.Event(), free_port()
    with live_server(tmp_path, first_weights(), settings, port=port) as info:
        thread = threading.Thread(target=work, args=(info.address,))
        thread.start()
        assert reached.wait(600)
    restarted.set()
    with live_server(tmp_path, first_weights(), settings, port=port) as again:
        thread.join(600)
        assert not thread.is_alive()
        assert again.run_id == info.run_id
    (summary,) = summaries
    assert isinstance(summary, AgentSummary)
    assert (summary.applied, summary.rejected) == (6, 0)
    assert "version 6, its budget" in summary.why


def test_four_devices_learn_and_a_follower_sees_it(tmp_path: Path) -> None:
    settings = config(
        run={"versions_max": 40}, strategy={"name": "fedbuff", "buffer_size": 2}, client={"steps": 20}
    )
    measured: list[Measurement] = []
    with live_server(tmp_path, first_weights(), settings) as info:

        def watch() -> None:
            options = FollowerOptions(
                "synthetic", info.address, info.admin_address, every=5, poll_s=0.02, threads=1
            )
            measured.extend(follow(options))

        def work(index: int) -> None:
            run_client(
                ClientOptions(
                    "synthetic",
                    info.address,
                    shard=(index, 4),
                    state_dir=tmp_path / f"device-{index}",
                )
            )

        threads = [threading.Thread(target=watch)]
        threads += [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
            assert not thread.is_alive()
        with OperatorClient(info.admin_address) as operator:
            status, versions = operator.status(), operator.versions(after=38)
            exported = operator.export(tmp_path / "model.safetensors")
            with pytest.raises(UnknownVersion):
                operator.export(tmp_path / "none.safetensors", 99)
    assert (status.version, status.clients, exported) == (40, 4, 40)
    assert "40" in status.finished
    assert [v.version for v in versions] == [39, 40]
    assert versions[-1].metrics == pytest.approx(measured[-1].metrics)
    assert measured[-1].version == 40
    seen = [m.version for m in measured[:-1]]
    assert all(b - a >= 5 for a, b in pairwise(seen))
    assert measured[-1].metrics["accuracy"] > 0.6  # chance is 0.1
    weights = load_file(tmp_path / "model.safetensors")
    assert digest(np.concatenate([weights[n].reshape(-1) for n in first_weights()])) == versions[-1].sha256
    assert not (tmp_path / "none.safetensors").exists()


def test_a_follower_stops_when_told(tmp_path: Path) -> None:
    with (
        live_server(tmp_path, first_weights(), config()) as info,
        GrpcTransport(info.address, "follower") as transport,
    ):
        follower = Follower(Synthetic(), transport, Shard("validation"))
        seen = []
        for measurement in follower:
            seen.append(measurement)
            follower.stop()
    assert [m.version for m in seen] == [0]
    assert set(seen[0].metrics) == {"accuracy", "loss"}


def test_an_operator_pauses_and_watches(tmp_path: Path) -> None:
    with live_server(tmp_path, first_weights(), config()) as info:
        with OperatorClient(info.admin_address) as operator:
            operator.pause()
            assert operator.status().paused
            operator.resume()
            assert not operator.status().paused
            run_client(ClientOptions("synthetic", info.address, "a", state_dir=tmp_path / "a", tasks_max=2))
            heard = []
            for event in operator.watch(after_seq=1):
                heard.append(event.kind)
                if heard.count("published") == 2:
                    break
            operator.report_metrics(2, {"accuracy": 0.5})
            assert operator.versions()[1].metrics == {"accuracy": 0.5}
        assert heard.count("granted") == heard.count("decided") == 2
    with OperatorClient(info.admin_address) as gone, pytest.raises(Unavailable):
        gone.status()


def test_a_full_size_update_passes_through(tmp_path: Path) -> None:
    """A model of 4 MiB: chunks both ways, through an App of one's own, named by its file."""
    app = tmp_path / "wide.py"
    app.write_text(
        "import numpy as np\n"
        "from anabranch.workloads.app import App as Base, Examples\n"
        "class App(Base):\n"
        "    def model(self, seed=0): return {'w': np.zeros(1 << 20, np.float32), 'n': np.array(7)}\n"
        "    def data(self, shard): return Examples(np.zeros((4, 1)), np.zeros(4))\n"
        "    def train(self, model, examples, plan, seed): model['w'] += 1\n"
    )
    weights = {"w": stream(0, "w").standard_normal(1 << 20).astype(np.float32), "n": np.array(7)}
    settings = config(strategy={"name": "fedasync", "alpha": 1.0})
    with live_server(tmp_path, weights, settings) as info:
        options = ClientOptions(f"{app}:App", info.address, "a", state_dir=tmp_path / "a", tasks_max=2)
        assert run_client(options).applied == 2
        with OperatorClient(info.admin_address) as operator:
            operator.export(tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert np.allclose(exported["w"], weights["w"] + 2)
    assert exported["n"] == 7
    assert list((tmp_path / "a" / "outbox").iterdir()) == []
