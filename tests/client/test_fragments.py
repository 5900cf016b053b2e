"""Devices whose tasks are of some tensors: over gRPC, with a server that is started again; their trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from agents import SHARD
from local_apps import Linear
from wire import Served, server_config

from anabranch.client.agent import Agent
from anabranch.client.summary import AgentSummary
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import AppError
from anabranch.core.model.submodels import tensor_set
from anabranch.core.model.updates import LocalPlan
from anabranch.server.manifest import write_manifest
from anabranch.server.verify import verify
from anabranch.workloads.calls import data_of
from anabranch.workloads.resident import LiveModule
from anabranch.workloads.synthetic import Synthetic
from anabranch.workloads.torch_trainer import TorchTrainer
from anabranch.workloads.trainer import trainer_for

FIRST, LAST = 64 * 32 + 32, 32 * 10 + 10  # values of the two layers
PLAN = LocalPlan(steps=3, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("strategy", [{"name": "fedasync"}, {"name": "fedbuff", "buffer_size": 2}])
def test_each_device_sends_its_parts_in_turn_whoever_is_started_again(
    strategy: dict[str, Any], tmp_path: Path
) -> None:
    trainer = trainer_for(Linear())
    manifest = write_manifest(tmp_path / "model", "linear", trainer.initial(0), trainer.spec.groups)
    tables: dict[str, Any] = {
        "strategy": strategy,
        "submodel": {"name": "fragments", "parts": 2},
        "uplink": {"codec": "ef(0.9)|int4(64)|zstd"},
    }
    config = server_config(tmp_path / "data", **tables)
    lives: list[list[AgentSummary]] = []
    for _ in range(3):
        with Served(config, manifest) as served:
            lives.append([one_task(served, name, tmp_path / name) for name in ("a", "b")])
            model = served.model()
    for of_device in zip(*lives, strict=True):
        assert [summary.applied for summary in of_device] == [1, 1, 1]
        raw = [summary.uplink_bytes_raw for summary in of_device]
        assert raw[0] == raw[2]
        assert sorted(raw[:2]) == [4 * LAST, 4 * FIRST]
        assert all(s.uplink_bytes < s.uplink_bytes_raw / 4 for s in of_device)
    assert not np.array_equal(model, manifest.spec.flatten(manifest.tensors))
    assert verify(tmp_path / "data", whole=True).problems == ()


def test_two_devices_that_train_on_exchange_their_parts_in_turn(tmp_path: Path) -> None:
    trainer = trainer_for(Synthetic())
    manifest = write_manifest(tmp_path / "model", "synthetic", trainer.initial(0), trainer.spec.groups)
    tables: dict[str, Any] = {
        "strategy": {"name": "fedasync", "alpha": 0.5},
        "client": {"push": "elastic", "push_when": "interval", "push_steps": 2, "merge": "blend"},
        "submodel": {"name": "fragments", "parts": 2},
        "uplink": {"codec": "int4(64)|zstd"},
        "downlink": {"codec": "log(2)"},
    }
    parts = [t.size for t in trainer.spec.tensors]
    with Served(server_config(tmp_path / "data", **tables), manifest) as served:
        assert served.info is not None
        for name in ("a", "b"):
            with GrpcTransport(served.info.address, name) as transport:
                summary = Agent(Synthetic(), transport, name, SHARD, tmp_path / name, tasks_max=4).run()
            assert (summary.applied, summary.failures) == (4, 0)
            assert summary.uplink_bytes_raw == 2 * 4 * sum(parts)  # each part twice
    assert verify(tmp_path / "data", whole=True).problems == ()


def one_task(served: Served, name: str, folder: Path) -> AgentSummary:
    assert served.info is not None
    with GrpcTransport(served.info.address, name) as transport:
        return Agent(Linear(), transport, name, SHARD, folder, tasks_max=1).run()


def test_only_the_tensors_of_a_task_are_trained_and_then_all_are_again() -> None:
    app = Linear("norm")
    trainer = TorchTrainer(app)
    spec, vector = trainer.spec, trainer.spec.flatten(trainer.initial(0))
    examples, frozen = data_of(app, SHARD), trainer.frozen
    last = tensor_set(spec, [i for i, t in enumerate(spec.tensors) if t.name.startswith("3.")])

    def trained(*only: Any) -> Any:
        delta = trainer.train(vector, frozen, examples, PLAN, 1, None, *only).delta
        return {name for name, at in spec.slices.items() if delta[at].any()}, delta

    everything, whole = trained()
    assert {"0.weight", "0.bias", "1.weight", "3.weight", "3.bias"} <= everything
    # Running statistics are no parameters: they move, but are of no use to anybody and do not travel.
    assert trained(last)[0] == {"3.weight", "3.bias", "1.running_mean", "1.running_var"}
    assert np.array_equal(trained()[1], whole)
    buffers = tensor_set(spec, [i for i, t in enumerate(spec.tensors) if t.name == "1.running_mean"])
    assert trained(buffers)[0] == everything  # a loss must lead somewhere


def test_arrays_cannot_be_kept_still() -> None:
    trainer = trainer_for(Synthetic())
    vector = trainer.spec.flatten(trainer.initial(0))
    with pytest.raises(AppError, match="a task is of some tensors"):
        trainer.train(vector, {}, data_of(Synthetic(), SHARD), PLAN, 1, None, tensor_set(trainer.spec, (0,)))


class Tied(torch.nn.Module):
    """What it reads with is what it writes with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
        self.outer = torch.nn.Linear(3, 3, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.outer(self.inner(x))
        return found


class TiedApp(Linear):
    name = "tied"

    def model(self) -> Any:
        return Tied()


def test_a_tensor_of_two_names_is_merged_once() -> None:
    trainer = TorchTrainer(TiedApp())
    change = trainer.spec.flatten(trainer.initial(0))
    live = LiveModule(trainer.resident(None), change)
    before = live.flat()
    live.add(change)
    assert np.array_equal(live.flat(), before + change)


def test_a_tensor_of_two_names_is_in_no_part_without_the_other() -> None:
    trainer = TorchTrainer(TiedApp())
    names = [tensor.name for tensor in trainer.spec.tensors]
    assert names == ["inner.weight", "inner.bias", "outer.weight"]
    for apart in ((0, 1), (2,)):
        with pytest.raises(AppError, match="are one tensor"):
            trainer.check_part(tensor_set(trainer.spec, apart))
        with pytest.raises(AppError, match="are one tensor"):
            trainer.train(np.zeros(21, np.float32), {}, data_of(TiedApp(), SHARD), PLAN, 1, None,
                          tensor_set(trainer.spec, apart))  # fmt: skip
    for together in ((1,), (0, 2)):
        trainer.check_part(tensor_set(trainer.spec, together))


def test_a_program_that_knows_no_tensors_is_told_what_to_install(tmp_path: Path) -> None:
    trainer = trainer_for(Linear())
    manifest = write_manifest(tmp_path / "model", "linear", trainer.initial(0), trainer.spec.groups)
    tables: dict[str, Any] = {"submodel": {"name": "fragments", "parts": 2}, "strategy": {"name": "fedasync"}}
    with Served(server_config(tmp_path / "data", **tables), manifest) as served:
        with pytest.raises(grpc.RpcError, match="does not know such tasks: install the same version"):
            served.device().enrol()
        assert one_task(served, "new", tmp_path / "new").applied == 1
    with Served(server_config(tmp_path / "whole", strategy={"name": "fedasync"}), manifest) as served:
        assert served.device().enrol().version == 0
