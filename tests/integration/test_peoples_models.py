"""Models that people bring: each learns, under every strategy and live, and leaves as what it came.

`make prove` has the whole table of models and strategies, `make test` a part of it that has each of both.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import live_server
from peoples_models import APPS
from ports import free_port
from proving import in_slices
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file

from anabranch.client.operator import OperatorClient
from anabranch.client.run import ClientOptions, run_client
from anabranch.client.summary import AgentSummary
from anabranch.core.config.tables import Config, merge
from anabranch.server.manifest import read_manifest, write_manifest
from anabranch.server.verify import verify
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import simulate
from anabranch.strategies.registry import STRATEGIES
from anabranch.workloads.app import Shard
from anabranch.workloads.trainer import trainer_for

HERE = Path(__file__).parents[1] / "support" / "peoples_models.py"
RATES = {"resnet": 0.1, "transformer": 0.005, "gru": 1.0, "autoencoder": 0.5, "logistic": 0.5}
PARAMS: dict[str, dict[str, Any]] = {
    "fedbuff": {"buffer_size": 3},
    "qafel": {"buffer_size": 3},
    "fedavg": {"clients_per_round": 3},
    "fedprox": {"clients_per_round": 3},
    "phased": {
        "phases": [
            {"strategy": "fedavg", "clients_per_round": 3, "until_updates": 12},
            {"strategy": "fedbuff", "buffer_size": 3},
        ]
    },
    "ca2fl": {"buffer_size": 3},
    "fadas": {"buffer_size": 2, "server_lr": 0.02},
    "port": {"buffer_size": 3},
    "annealed": {"buffer_size": 3},
    "teasq": {"cache_size": 2, "concurrency_fraction": 1.0},
    "teasq_drop": {"cache_size": 2, "concurrency_fraction": 1.0},
}
QUICK = [
    ("logistic", "fedbuff"),
    ("resnet", "teasq_drop"),
    ("transformer", "asyncdrop"),
    ("gru", "teasq"),
    ("autoencoder", "qafel"),
    ("autoencoder", "fedavg"),
    ("logistic", "fedasync"),
    ("logistic", "fedprox"),
    ("logistic", "delayed_nesterov"),
    ("logistic", "fadas"),
    ("logistic", "ca2fl"),
    ("logistic", "ace"),
    ("logistic", "aced"),
    ("logistic", "fedcompass"),
    ("logistic", "port"),
    ("logistic", "fedasmu"),
    ("logistic", "fedfa"),
    ("logistic", "annealed"),
    ("logistic", "waves"),
    ("logistic", "phased"),
]
# Live, these have each way in which an update is taken in: at once, into a buffer, a round, a cap of devices,
# a memory of each device, parts of a model, waves, one after another.
LIVE = {"annealed", "asyncdrop", "ca2fl", "fedasync", "fedavg", "fedbuff", "phased", "teasq", "waves"}
LIVE_WITH_SLOW = set(STRATEGIES.names()) - LIVE
UPDATES = 24
RIGHT = 0.15  # by guessing among ten classes it is 0.1, by the most frequent one 0.11
ALL = [(model, strategy) for model in APPS for strategy in STRATEGIES.names()]


def settings(model: str, strategy: str, **run: Any) -> Config:
    """Four unequal devices; who has no groups of units trains the whole."""
    whole = {"submodel": {"name": "none"}} if model == "logistic" else {}
    # Its step is no longer than its rate: averaged, a norm's statistics are behind the weights for long.
    at_once = {"model": {"buffers": "latest"}} if strategy == "fadas" else {}
    tables = {
        "run": {"name": model, "workload": f"{HERE}:{APPS[model].__name__}", "updates_max": UPDATES, **run},
        "fleet": {"clients": 4, "speed_ratio": 2.0},
        "client": {"learning_rate": RATES[model], "steps": 12},
        "strategy": {"name": strategy, **PARAMS.get(strategy, {})},
    }
    return merge([("test", {**tables, **whole, **at_once})])


def loss_of(model: str, file: Path) -> float:
    """The loss on held-out data of what a file has, loaded as somebody does who has never heard of us."""
    app = APPS[model]()
    held_out = app.data(Shard("test"))
    if model == "logistic":
        found = load_arrays(file)
        assert {n: (a.shape, a.dtype) for n, a in found.items()} == {
            n: (a.shape, a.dtype) for n, a in app.model().items()
        }
        return app.evaluate(found, held_out)["loss"]
    module = app.model()
    module.load_state_dict(load_file(file), strict=True)
    return app.evaluate(module, held_out)["loss"]


def learns_in_a_simulation(model: str, strategy: str, folder: Path) -> None:
    result = simulate(settings(model, strategy), folder)
    first, last = result.history[0], result.history[-1]
    assert result.updates_applied == UPDATES
    assert first.loss is not None
    assert last.loss is not None
    assert last.loss < 0.95 * first.loss
    if model != "autoencoder":
        assert first.accuracy is not None
        assert last.accuracy is not None
        assert last.accuracy > max(RIGHT, first.accuracy)
    assert loss_of(model, folder / "final.safetensors") == pytest.approx(last.loss, rel=1e-4)
    assert replay_run(folder).matches


def test_the_quick_part_has_all_of_both() -> None:
    assert {model for model, _ in QUICK} == set(APPS)
    assert {strategy for _, strategy in QUICK} == {strategy for _, strategy in ALL}


@pytest.mark.parametrize(("model", "strategy"), QUICK)
def test_it_learns_in_a_simulation(model: str, strategy: str, tmp_path: Path) -> None:
    learns_in_a_simulation(model, strategy, tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize(("model", "strategy"), [pair for pair in ALL if pair not in QUICK])
def test_it_learns_under_every_strategy(model: str, strategy: str, tmp_path: Path) -> None:
    learns_in_a_simulation(model, strategy, tmp_path)


@pytest.mark.parametrize("model", APPS)
def test_it_learns_live_on_a_device_that_starts_again(model: str, tmp_path: Path) -> None:
    config, trainer = settings(model, "fedbuff", updates_max=0), trainer_for(APPS[model]())
    spec = trainer.spec
    write_manifest(tmp_path / "described", model, trainer.initial(0), spec.groups, spec.buffers)
    manifest = read_manifest(tmp_path / "described")
    app, out = f"{HERE}:{APPS[model].__name__}", tmp_path / "out.safetensors"
    with live_server(tmp_path, manifest.tensors, config, groups=spec.groups, buffers=spec.buffers) as info:
        with OperatorClient(info.admin_address) as operator:
            operator.export(tmp_path / "first.safetensors")
        for tasks_max in (1, 1, 4):  # lives: each begins with what the one before has left on the disk
            options = ClientOptions(
                app, info.address, "a", (0, 4), tmp_path / "a", tasks_max=tasks_max, threads=1
            )
            done = run_client(options)
            assert (done.answered, done.failures) == (tasks_max, 0), done
        with OperatorClient(info.admin_address) as operator:
            assert operator.status().version == 2
            operator.export(out)
    assert loss_of(model, out) < loss_of(model, tmp_path / "first.safetensors")


class Devices:
    """Three of them in threads; who has pushed the eighth update, or a later one, waits for `restarted`."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self.ends: list[AgentSummary] = []
        self.enough, self.restarted, self._pushed = threading.Event(), threading.Event(), itertools.count(1)
        self._threads = [threading.Thread(target=self._work, args=(index,)) for index in range(3)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(600)
            assert not thread.is_alive()

    def _work(self, index: int) -> None:
        app, home = f"{HERE}:{APPS['logistic'].__name__}", self.folder / f"device-{index}"
        options = ClientOptions(app, self.address, f"device-{index}", (index, 3), home, threads=1)
        patient = replace(options, retry_base_s=0.05, retry_cap_s=0.2)
        self.ends.append(run_client(patient, self._hear))

    def _hear(self, kind: str, **_: Any) -> None:
        if kind == "pushed" and next(self._pushed) >= 8:
            self.enough.set()
            assert self.restarted.wait(600)


@pytest.mark.parametrize("strategy", in_slices(STRATEGIES.names(), (), LIVE_WITH_SLOW))
def test_it_learns_live_under_every_strategy_across_a_restart(strategy: str, tmp_path: Path) -> None:
    config, first, buffers = settings("logistic", strategy), APPS["logistic"]().model(), ("mean", "scale")
    port = free_port()
    with live_server(tmp_path, first, config, port=port, buffers=buffers) as info:
        devices = Devices(tmp_path, info.address)
        assert devices.enough.wait(600)
    devices.restarted.set()
    with live_server(tmp_path, first, config, port=port, buffers=buffers) as again:
        devices.join()
        with OperatorClient(again.admin_address) as operator:
            status = operator.status()
            operator.export(tmp_path / "out.safetensors")
    assert again.run_id == info.run_id
    assert sum(end.applied for end in devices.ends) == status.updates_applied >= UPDATES
    guess = -np.log(1 / 10)  # the loss of weights of zero, with ten classes
    assert loss_of("logistic", tmp_path / "out.safetensors") < 0.95 * guess
    assert verify(tmp_path / "data", whole=True).problems == ()
