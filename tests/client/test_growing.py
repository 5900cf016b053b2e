"""Devices of a model that grows: over gRPC, with a server that is started again, and a follower."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agents import SHARD
from growing_app import NEEDED, WARMED, App, Grower, names_of
from wire import Served, server_config

from anabranch.client.agent import Agent
from anabranch.client.checkup import Checkup
from anabranch.client.follower import Follower
from anabranch.client.summary import AgentSummary
from anabranch.client.trainer import LocalTrainer
from anabranch.client.transport import GrpcTransport
from anabranch.core.config.tables import ClientTable
from anabranch.core.errors import ManifestMismatch
from anabranch.core.model.stages import ModelStage
from anabranch.core.model.updates import LocalPlan
from anabranch.protos.convert import manifest_from_proto, manifest_to_proto
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.verify import verify
from anabranch.workloads.app import Shard
from anabranch.workloads.calls import data_of
from anabranch.workloads.trainer import trainer_for

GROWN = {"name": "progressive", "grow_at": [0.25, 0.5], "warm_up_versions": 1}  # of eight: 2 and 4
TRAINED = [NEEDED[0]] * 2 + [WARMED[1], NEEDED[1]] + [WARMED[2]] + [NEEDED[2]] * 3
FETCHED = [NEEDED[0]] * 2 + [NEEDED[1]] * 2 + [NEEDED[2]] * 4


def manifest_of(app: Any, folder: Path) -> Manifest:
    trainer = trainer_for(app)
    spec = trainer.spec
    return write_manifest(folder, app.name, trainer.initial(0), spec.groups, stages=spec.stages)


def tables(**more: Any) -> dict[str, Any]:
    return {
        "strategy": {"name": "fedasync"},
        "submodel": GROWN,
        "run": {"versions_max": 8},
        "client": {"steps": 2},
        **more,
    }


def one_task(served: Served, folder: Path, app: Any = None) -> AgentSummary:
    assert served.info is not None
    with GrpcTransport(served.info.address, "a") as transport:
        return Agent(app or App(), transport, "a", SHARD, folder, tasks_max=1).run()


def test_a_device_fetches_and_sends_what_its_stage_has_whoever_is_started_again(tmp_path: Path) -> None:
    manifest = manifest_of(App(), tmp_path / "model")
    config = server_config(tmp_path / "data", **tables())
    longer = server_config(tmp_path / "data", **tables(run={"versions_max": 80}))  # its stages stay
    sent, fetched, models = [], [], [manifest.vector]
    for life in range(8):
        with Served(longer if life > 2 else config, manifest) as served:
            summary = one_task(served, tmp_path / "a")
            assert (summary.applied, summary.failures) == (1, 0)
            sent.append(summary.uplink_bytes)
            fetched.append(summary.downlink_bytes)
            models.append(served.model())
    assert sent == [4 * count for count in TRAINED]
    assert fetched == [4 * count for count in FETCHED]
    moved = [changed(manifest, a, b) for a, b in pairwise(models)]
    assert moved[0] == moved[1] == names_of((1,), 1)
    assert moved[2] == names_of((2,), 2)
    assert moved[3] == names_of((1, 2), 2)
    assert moved[4] == names_of((3,), 3)
    assert moved[5] == moved[7] == names_of((1, 2, 3), 3)
    assert verify(tmp_path / "data", whole=True).problems == ()


def changed(manifest: Manifest, before: Any, after: Any) -> set[str]:
    return {n for n, at in manifest.spec.slices.items() if not np.array_equal(before[at], after[at])}


def test_an_encoded_version_is_fetched_whole_and_its_stage_trained_all_the_same(tmp_path: Path) -> None:
    manifest = manifest_of(App(), tmp_path / "model")
    more = {"downlink": {"codec": "int8(64)|zstd"}, "uplink": {"codec": "ef(0.9)|int4(64)|zstd"}}
    with Served(server_config(tmp_path / "data", **tables(**more)), manifest) as served:
        summary = one_task(served, tmp_path / "a")
        assert summary.applied == 1
        assert summary.uplink_bytes_raw == 4 * NEEDED[0]
        assert changed(manifest, manifest.vector, served.model()) == names_of((1,), 1)


def test_a_follower_measures_a_version_at_its_stage(tmp_path: Path) -> None:
    manifest = manifest_of(App(), tmp_path / "model")
    config = server_config(tmp_path / "data", **tables())
    trainer, examples = trainer_for(App()), data_of(App(), Shard("test"))
    with Served(config, manifest) as served:
        assert served.info is not None
        for expected in (1, 1, 2, 2, 3):
            with GrpcTransport(served.info.address, "follower") as transport:
                follower = Follower(App(), transport, Shard("test"), once=True, config=config.to_json())
                (seen,) = follower
            there, another = (
                trainer.evaluate(served.model(), {}, examples, stage)
                for stage in (expected, expected % 3 + 1)
            )
            assert seen.metrics == pytest.approx(there, rel=1e-5)  # a GPU's last bits are its own
            assert seen.metrics != pytest.approx(another, rel=1e-5)
            one_task(served, tmp_path / "a")


class AlwaysWhole(Grower):
    """Forgets its stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        found: torch.Tensor = self.heads[2](x)
        return found


class OneHead(Grower):
    """Ends with the first head at every stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.blocks[0](x))
        found: torch.Tensor = self.heads[0](x)
        return found


class Headless(Grower):
    """Ends with the last block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in list(self.blocks)[: self.stage]:
            x = torch.relu(block(x))
        return torch.nn.functional.pad(x, (0, 10 - x.shape[1]))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Grower, ("ok", "3, each trained by itself")),
        (AlwaysWhole, ("fail", "stage 1: the module reads what is no part of it: its forward must go by")),
        (OneHead, ("fail", "stage 2: the module reads what is no part of it")),
        (Headless, ("fail", "stage 1: heads.0.weight, heads.0.bias did not move: forward must end with")),
    ],
)
def test_check_trains_each_stage_by_itself(module: type[Grower], said: tuple[str, str]) -> None:
    class Checked(App):
        def model(self) -> Any:
            return module()

    findings = list(Checkup(Checked(), {"fleet": {"clients": 4}}, LocalPlan(), 1))
    ((level, text),) = [(f.level, f.text) for f in findings if f.about == "stages"]
    assert level == said[0]
    assert text.startswith(said[1])
    if module is Grower:
        assert not [f for f in findings if f.level != "ok" and f.about == "training"]


def test_a_device_whose_app_has_no_stages_is_told(tmp_path: Path) -> None:
    class Bare(App):
        def stages(self, model: Any) -> Any:
            return None

    manifest = manifest_of(App(), tmp_path / "model")
    told = pytest.raises(ManifestMismatch, match="grows, and Bare has no stages: train it by the App")
    with Served(server_config(tmp_path / "data", **tables()), manifest) as served, told:
        one_task(served, tmp_path / "bare", Bare())


def test_a_device_whose_app_has_other_stages_is_told(tmp_path: Path) -> None:
    """The same tensors in one stage less: it would train at stage 2 what nobody reads there."""

    class Two(App):
        def model(self) -> Any:
            grower = super().model()
            grower.stage = 2
            return grower

        def stages(self, model: Any) -> Any:
            first, *others = super().stages(model)
            blocks, heads = zip(*((stage.blocks, stage.head) for stage in others), strict=True)
            return [first, ModelStage([n for names in blocks + heads[:1] for n in names], heads[-1])]

    manifest = manifest_of(App(), tmp_path / "model")
    said = r"Two has other stages: stage 2 is .*, in the run .* with the head heads\.1.*: train it by the App"
    told = pytest.raises(ManifestMismatch, match=said)
    with Served(server_config(tmp_path / "data", **tables()), manifest) as served:
        with told:
            one_task(served, tmp_path / "two", Two())
        one_task(served, tmp_path / "one", App())


def test_other_stages_do_not_matter_to_a_run_that_does_not_grow(tmp_path: Path) -> None:
    trainer = LocalTrainer(App(), ClientTable())
    bare = replace(trainer.spec, stages=())
    trainer.join(bare, {"submodel": {"name": "progressive"}})  # of a server that does not tell them
    trainer.join(replace(bare, stages=trainer.spec.stages[::-1]), {})
    assert trainer.spec.stages[0].head[0].startswith("heads.0")


def test_stages_travel_with_the_manifest() -> None:
    spec = trainer_for(App()).spec
    assert len(spec.stages) == 3
    message = manifest_to_proto(spec)
    assert manifest_from_proto(message).stages == spec.stages
    message.stages[1].head[0] = "nothing"
    with pytest.raises(ManifestMismatch, match=r"the manifest was damaged on the way: .*'nothing'"):
        manifest_from_proto(message)
