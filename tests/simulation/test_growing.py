"""Simulated fleets whose model grows: one history however it is run, bytes as counted by hand, fair times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import events, recorded
from growing_app import HEADS, NEEDED, WARMED, App, names_of
from safetensors.numpy import load_file

from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import ConfigError
from anabranch.reports.result import Result
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import simulate

APP = f"{Path(__file__).parents[1] / 'support' / 'growing_app.py'}:App"
GROWN = {"name": "progressive", "grow_at": [0.25, 0.5], "warm_up_versions": 2}


def config(strategy: str = "fedbuff", params: Any = None, **tables: Any) -> Config:
    """Twenty versions: the second stage begins at the fifth, the third at the tenth."""
    known: dict[str, Any] = {
        "fedbuff": {"buffer_size": 2},
        "fedavg": {"clients_per_round": 2, "deadline_s": 60.0},
        "teasq_drop": {"cache_size": 2, "concurrency_fraction": 1.0},
    }
    base: dict[str, Any] = {
        "run": {"workload": APP, "versions_max": 20, "evaluate_every_versions": 0},
        "fleet": {"clients": 4, "examples_per_client": 64},
        "strategy": {"name": strategy, **known.get(strategy, {}), **(params or {})},
        "submodel": GROWN,
    }
    return merge([("base", base), ("test", tables)])


def digests(result: Result) -> tuple[str, str]:
    return result.model_sha256, result.journal_sha256


ROUGH = {"dropout": 0.2, "availability": 0.7, "availability_period_s": 15.0, "up_mbps": 1.0}
CASES: dict[str, Config] = {
    "fedbuff": config(fleet=ROUGH, run={"evaluate_every_versions": 5}),
    "fedasync": config("fedasync"),
    "fedavg": config("fedavg"),
    "teasq_drop": config("teasq_drop"),
    "compressed": config(
        uplink={"codec": "ef(0.9)|topk(0.1)|int8|gaps|zstd"}, downlink={"codec": "log(1,8)"}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_seed_has_one_history(name: str, tmp_path: Path) -> None:
    result, expected = recorded(CASES[name], tmp_path)
    assert result.versions == 20
    for way in ("payloads", "simulation"):
        replayed = replay_run(tmp_path, App())
        assert (replayed.matches, replayed.way, replayed.state_sha256) == (True, way, expected)
        (tmp_path / "payloads.zip").unlink(missing_ok=True)


def test_every_executor_comes_to_the_same() -> None:
    settings = config(run={"evaluate_every_versions": 5})
    alone = simulate(settings)
    assert digests(simulate(settings, workers=1)) == digests(alone)
    stacked = simulate(merge([("alone", settings.to_json()), ("test", {"fleet": {"executor": "batched"}})]))
    assert (stacked.model_sha256, stacked.history) == (alone.model_sha256, alone.history)


def test_the_bytes_of_each_way_are_those_of_the_manifest(tmp_path: Path) -> None:
    recorded(config("fedasync", fleet={"clients": 1}, server={"tasks_per_client": 1}), tmp_path)
    sent = [event["uplink_bytes"] for event in events(tmp_path, "decided")]
    # Versions 5 and 6, and 10 and 11, train what is new.
    trained = [NEEDED[0]] * 5 + [WARMED[1]] * 2 + [NEEDED[1]] * 3 + [WARMED[2]] * 2 + [NEEDED[2]] * 8
    assert sent == [4 * count for count in trained]
    fetched = [event["bytes"] for event in events(tmp_path, "downloaded")]
    assert fetched == [4 * count for count in [NEEDED[0]] * 5 + [NEEDED[1]] * 5 + [NEEDED[2]] * 10]


@pytest.mark.parametrize("strategy", ["fedasync", "fedavg", "fedbuff"])
def test_the_last_stage_from_the_start_is_the_whole_model_to_the_bit(strategy: str, tmp_path: Path) -> None:
    last = {"name": "progressive", "grow_at": [0.0, 0.001], "warm_up_versions": 5}
    at_once: dict[str, Any] = {"fleet": {"latency_s": 0.0}}  # a part is fetched again where a model is kept
    grown, _ = recorded(config(strategy, submodel=last, **at_once), tmp_path / "grown")
    none = {"name": "none", "grow_at": []}
    whole, _ = recorded(config(strategy, submodel=none, **at_once), tmp_path / "whole")
    assert grown.updates_applied == whole.updates_applied
    assert grown.uplink_bytes == whole.uplink_bytes - 4 * sum(HEADS[:2]) * grown.updates_applied
    models = [load_file(tmp_path / way / "final.safetensors") for way in ("grown", "whole")]
    for name in names_of((1, 2, 3), 3):  # mixing may round the heads that nobody reads
        assert np.array_equal(models[0][name], models[1][name]), name


def test_versions_are_measured_at_their_stage(tmp_path: Path) -> None:
    """At version 5 the second head has learned nothing yet; the first one has."""
    grown = simulate(config(run={"evaluate_every_versions": 1}, client={"learning_rate": 0.3}), tmp_path)
    losses = {point.version: point.loss for point in grown.history}
    known = {version: loss for version, loss in losses.items() if loss is not None}
    assert known[4] < known[0]
    assert known[5] > known[4]
    assert known[20] < known[10]


def test_steps_of_early_stages_take_less_time(tmp_path: Path) -> None:
    spent = {}
    for way in ("operations", "whole"):
        out = tmp_path / way
        recorded(config("fedasync", fleet={"clients": 1, "submodel_step": way}), out)
        took = [event["metrics"]["train_s"] for event in events(out, "decided")]
        spent[way] = took
    assert spent["operations"][0] < spent["whole"][0]
    assert spent["operations"][-1] == pytest.approx(spent["whole"][-1])


def test_an_app_without_stages_is_told(tmp_path: Path) -> None:
    settings = merge([("grown", config().to_json()), ("test", {"run": {"workload": "digits"}})])
    with pytest.raises(ConfigError, match="this model has no stages"):
        simulate(settings, tmp_path)
