"""Runs without gradients: what they go together with, whoever trains them, and that they learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import AppError
from anabranch.simulation.executors.choice import chosen
from anabranch.simulation.problem import ProblemSource
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import simulate
from anabranch.testing.federation import config
from anabranch.workloads.app import Examples
from anabranch.workloads.digits import Digits
from anabranch.workloads.subspace import Subspace

ZEROTH = {"gradient": "zeroth", "steps": 5, "learning_rate": 0.02}
BUFFER = {"strategy": {"name": "fedbuff", "buffer_size": 3}}
SECAGG = {"mode": "keeper", "keepers": ["north", "south"], "clip": 2.0, "cohort_min": 2}
ELASTIC = {"push": "elastic", "push_when": "interval", "push_steps": 5}
# What the table of docs/subspace.md says that it goes together with.
COMBINATIONS: dict[str, dict[str, Any]] = {
    "codecs and error feedback": {**BUFFER, "uplink": {"codec": "ef(0.9)|topk(0.1)|int8|gaps|zstd"}},
    "the delta log": {**BUFFER, "downlink": {"codec": "log(2)"}},
    "robust rules": {**BUFFER, "robust": {"rule": "centred_clipping"}},
    "privacy": {**BUFFER, "privacy": {"clip": 1.0, "noise": 0.5, "participations": 9}},
    "masked sums": {**BUFFER, "secagg": SECAGG},
    "TEASQ": {"strategy": {"name": "teasq"}},
    "sub-models": {"strategy": {"name": "asyncdrop"}},
    "devices that train on": {"client": ELASTIC},
    "fragments": {"client": {**ELASTIC, "merge": "blend"}, "submodel": {"name": "fragments", "parts": 2}},
    "overlap": {"client": {"push": "overlap"}, "server": {"tasks_per_client": 2}},
    "devices that crash": {"faults": {"loss": 0.1, "device_crash_every_s": 5.0}},
}


class NoGradients(Digits):
    """Whoever asks for a gradient trains by another rule: nobody may."""

    name = "no-gradients"

    def model(self) -> Any:
        net = super().model()
        for parameter in net.parameters():
            parameter.register_hook(_asked)
        return net


def _asked(gradient: Any) -> Any:
    raise AssertionError(f"a gradient was made, of shape {gradient.shape}")


def settings(**tables: Any) -> Config:
    client, run = {**ZEROTH, **tables.pop("client", {})}, {"updates_max": 16, "seed": 4}
    return config(run={**run, **tables.pop("run", {})}, client=client, **tables)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_it_goes_together_with(name: str, tmp_path: Path) -> None:
    result = simulate(settings(**COMBINATIONS[name]), tmp_path / "run", app=NoGradients())
    assert result.updates_applied >= 8
    assert result.versions > 0
    assert replay_run(tmp_path / "run", load_code=True).journal_sha256 == result.journal_sha256


@pytest.mark.parametrize("app", ["synthetic", pytest.param("digits", marks=pytest.mark.prove)])
def test_a_run_is_the_same_whoever_trains_it(app: str) -> None:
    runs = [
        simulate(settings(run={"workload": app}, fleet={"executor": name}), workers=workers)
        for name, workers in (("serial", 0), ("processes", 1))
    ]
    assert runs[0].model_sha256 == runs[1].model_sha256


def test_it_is_trained_one_by_one_where_stacks_would_pay(caplog: pytest.LogCaptureFixture) -> None:
    many: Any = {"clients": 20, "examples_per_client": 20}
    of_digits = {"workload": "digits", "updates_max": 20}
    auto = merge([("a", settings(fleet=many).to_json()), ("b", {"run": of_digits})])
    exact = merge([("a", auto.to_json()), ("b", {"client": {"gradient": "exact"}})])
    assert chosen(auto, ProblemSource(auto).open(), 0) == "serial"
    assert chosen(exact, ProblemSource(exact).open(), 0) == "batched"
    asked = merge([("a", auto.to_json()), ("b", {"fleet": {"executor": "batched"}})])
    assert simulate(asked).model_sha256 == simulate(auto).model_sha256
    assert "devices are trained one by one: they train without gradients" in caplog.text


def test_it_learns() -> None:
    """256 numbers, in the passes of a fifth as many steps by gradients."""
    tables = {
        "run": {"updates_max": 80, "evaluate_every_versions": 50},
        "client": {"gradient": "zeroth", "steps": 30, "learning_rate": 0.15},
        "fleet": {"clients": 8},
    }
    result = simulate(merge([("test", tables)]), app=Subspace(Digits(), 256))
    before, after = result.history[0].accuracy, result.final_accuracy
    assert before is not None
    assert after is not None
    assert before < 0.2
    assert after > 0.3


def test_an_app_whose_training_is_its_own_is_refused_before_anything_is_learnt() -> None:
    class Own(Digits):
        def train(self, model: Any, examples: Examples, plan: Any, seed: int) -> Any:
            raise AssertionError("it is not called")

    with pytest.raises(AppError, match=r"has no loss to call: Own has a train of its own\. Write batch_loss"):
        simulate(settings(), app=Own())
