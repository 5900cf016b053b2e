"""Norms with running statistics, which devices find on data of their own: simulated from end to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.effects import Effect, Published
from anabranch.core.model.params import Vector
from anabranch.core.snapshot import state_digest
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import Simulation, open_simulation, simulate
from anabranch.simulation.server import Process
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.digits import Digits


class Normed(Digits):
    """The digits, which a device sees in a brightness of its own, and a net with norms."""

    name = "normed"

    def model(self) -> Any:
        layers = [nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 24)]
        layers.append(nn.BatchNorm1d(24))
        return nn.Sequential(*layers, nn.ReLU(), nn.Linear(24, 10))

    def data(self, shard: Shard) -> Examples:
        found = super().data(shard)
        if shard.role != "train":
            return found
        return Examples(found.x * np.float32(0.6 + 0.1 * (shard.index % 8)), found.y)


def config(**tables: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "run": {"updates_max": 120, "evaluate_every_versions": 4},
        "fleet": {"clients": 8, "speed_ratio": 5.0},
        "client": {"learning_rate": 0.1},
    }
    return merge([("test", base), ("this test", tables)])


def variances(simulation: Simulation) -> Iterator[Vector]:
    """The running variances of each version, while the simulation runs."""
    spec = simulation.engine.spec
    names = [name for name in spec.buffers if name.endswith("running_var")]
    assert len(names) == 2
    found: list[Vector] = []

    def see(_: ev.Event, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Published):
                model = effect.vector
                found.append(np.concatenate([model[spec.slices[name]] for name in names]))

    simulation.world.observers.append(see)
    simulation.run()
    yield from found


SETTINGS: dict[str, dict[str, Any]] = {
    # Added up as weights are, the variances of this one go to -2: forty devices find the same too large.
    "defaults": {
        "fleet": {"clients": 40, "speed_ratio": 2.0},
        "client": {"steps": 20, "learning_rate": 0.05},
    },
    "a bold server": {"strategy": {"name": "fedbuff", "server_lr": 1.5, "buffer_size": 4}},
    "compressed": {"strategy": {"name": "teasq", "concurrency_fraction": 1.0, "cache_size": 4}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_it_learns_and_no_variance_goes_below_zero(name: str) -> None:
    with open_simulation(config(**SETTINGS[name]), app=Normed()) as simulation:
        seen = list(variances(simulation))
        result = simulation.result(0.0)
    assert len(seen) >= 10
    assert all((found >= 0).all() for found in seen)
    assert not np.array_equal(seen[0], seen[-1])
    assert result.final_accuracy is not None
    assert result.final_accuracy > 0.8


@pytest.mark.parametrize("policy", ["average", "latest", "local"])
def test_a_run_replays_to_the_same_digest(policy: str, tmp_path: Path) -> None:
    settings = config(
        model={"buffers": policy},
        run={"updates_max": 24},
        faults={"server_crash_every_s": 2.0, "server_down_s": 0.5, "device_crash_every_s": 20.0},
        server={"snapshot_every_updates": 1},
        uplink={"codec": "ef(0.9)|topk(0.1)|int8"},
        downlink={"codec": "log(1)"},
        strategy={"name": "fedbuff", "buffer_size": 4},
    )
    with open_simulation(settings, app=Normed()) as simulation:
        simulation.run()
        expected = state_digest(simulation.engine)
        assert isinstance(simulation.server, Process)
        assert simulation.server.restarts > 1
    result = simulate(settings, tmp_path, app=Normed())
    outcome = replay_run(tmp_path, app=Normed())
    assert outcome.matches
    assert outcome.state_sha256 == expected
    assert result.versions == 6


def test_under_local_the_server_keeps_what_the_run_started_with() -> None:
    settings = config(model={"buffers": "local"}, run={"updates_max": 24})
    with open_simulation(settings, app=Normed()) as simulation:
        spec = simulation.engine.spec
        first = simulation.engine.vector[spec.buffer_places].copy()
        simulation.run()
        np.testing.assert_array_equal(simulation.engine.vector[spec.buffer_places], first)
        own = [device._disk.own for device in simulation.devices]
    assert all(own)
    assert len(set(own)) == len(own), "each has its own, of its own data"


def test_workers_and_sub_models_come_to_the_same() -> None:
    tables: dict[str, dict[str, Any]] = {
        "model": {"buffers": "local"},
        "run": {"updates_max": 16, "workload": f"{__file__}:Normed"},  # which a worker can find
        "strategy": {"name": "teasq_drop", "concurrency_fraction": 1.0, "cache_size": 4},
    }
    here, there = simulate(config(**tables)), simulate(config(**tables), workers=1)
    assert here.model_sha256 == there.model_sha256
    assert here.journal_sha256 == there.journal_sha256
