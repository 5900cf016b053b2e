"""What `search` decides by: each of its trials is a run of its own, and comes to what that run comes to."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from commands import anabranch

import anabranch as ab
from anabranch.core.model.params import Tensors
from anabranch.core.rng import seed_of
from anabranch.reports.result import Result
from anabranch.simulation.run import open_simulation

# Its own budgets, schedule and end are not those of a trial; a device's updates are rejected.
SEARCHED = """
[run]
workload = "synthetic"
seed = 3
target_accuracy = 0.01
updates_max = 3
versions_max = 2
virtual_s_max = 0.001
evaluate_every_versions = 5
[fleet]
clients = 4
examples_per_client = 40
attack = "nan"
attackers = 0.25
[strategy]
name = "teasq"
kept = 0.5
bits = 16
decay_every = 1
"""
TRIAL = {
    "run.target_accuracy": 0.0,
    "run.updates_max": 24,
    "run.versions_max": 0,
    "run.virtual_s_max": 0.0,
    "run.evaluate_every_versions": 1,
    "run.evaluate_on": "validation",
    "run.seed": seed_of(3, "search") % 2**31,
    "strategy.decay_every": 0,
}


def repeated(file: Path, start: Tensors | None, **changed: float) -> tuple[Result, Tensors]:
    """A trial run by itself: its result, and the weights that it came to."""
    settings = {**TRIAL, **{name.replace("__", "."): value for name, value in changed.items()}}
    config = ab.load_config(file, [f"{name}={value}" for name, value in settings.items()])
    with open_simulation(config, start=start) as simulation:
        simulation.run()
        engine = simulation.engine
        return simulation.result(0.0), engine.spec.unflatten(engine.vector, simulation.frozen)


@pytest.mark.parametrize("warm_up", [0, 12])
def test_a_trial_is_a_short_run_on_the_validation_part(tmp_path: Path, warm_up: int) -> None:
    file = tmp_path / "run.toml"
    file.write_text(SEARCHED)
    options = ("--updates", 24, "--warm-up-updates", warm_up, "--loss-max", 0.02, "--out", "found", "--json")
    done = anabranch(tmp_path, "search", file, *options)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    trials = [line for line in told if line["kind"] == "trial"]
    start = None
    if warm_up:
        _, start = repeated(file, None, strategy__kept=1.0, strategy__bits=32, run__updates_max=warm_up)
    for trial in trials:
        result, _ = repeated(file, start, strategy__kept=trial["kept"], strategy__bits=trial["bits"])
        assert len(result.history) > 7
        assert result.updates_rejected > 0
        last = result.history[-(len(result.history) // 4) :]
        assert trial["accuracy"] == pytest.approx(fmean(p.measured["accuracy"] or 0.0 for p in last))
        decided = result.updates_applied + result.updates_rejected
        assert trial["update_bytes"] == pytest.approx(result.uplink_bytes / decided)
    assert len({trial["accuracy"] for trial in trials}) > 1
