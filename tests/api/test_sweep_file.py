"""`[sweep]` in a file of settings: the runs of `sweep` with the same grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import anabranch, answer

import anabranch as ab
from anabranch.api.sweep_file import read_sweep
from anabranch.core.errors import ConfigError

RUN = """
[run]
workload = "synthetic"
updates_max = 6
[fleet]
clients = 3
examples_per_client = 40
[strategy]
name = "fedasync"
alpha = 0.4
"""
GRID = """
[sweep]
seeds = [2, 4]
[sweep.grid]
"strategy.name" = ["fedasync", "fedbuff"]
client = { steps = [2, 3] }
"""
LIST = """
[sweep]
seeds = 1
[[sweep.choices]]
strategy = { name = "fedbuff", buffer_size = 3 }
[[sweep.choices]]
"client.steps" = 2
"""


def written(folder: Path, sweep: str) -> Path:
    path = folder / "run.toml"
    path.write_text(RUN + sweep)
    return path


def test_its_runs_are_those_of_the_grid(tmp_path: Path) -> None:
    found = ab.sweep(written(tmp_path, GRID), progress=False)
    (tmp_path / "run.toml").write_text(RUN)
    grid: Any = {"strategy.name": ["fedasync", "fedbuff"], "client.steps": [2, 3]}
    same = ab.sweep(tmp_path / "run.toml", grid, seeds=[2, 4], progress=False)
    assert len(found.runs) == 8
    assert [r.result.journal_sha256 for r in found.runs] == [r.result.journal_sha256 for r in same.runs]
    assert found.rows.column("strategy.name") == ["fedasync"] * 4 + ["fedbuff"] * 4


def test_choices_are_listed_one_by_one(tmp_path: Path) -> None:
    found = ab.sweep(written(tmp_path, LIST), progress=False)
    told = [(r.config.strategy.name, r.config.strategy.params, r.config.client.steps) for r in found.runs]
    assert told == [("fedbuff", {"buffer_size": 3}, 0), ("fedasync", {"alpha": 0.4}, 2)]
    listed: list[Any] = [{"strategy": ab.strategies.FedBuff(buffer_size=3)}, {"client.steps": 2}]
    (tmp_path / "run.toml").write_text(RUN)
    same = ab.sweep(tmp_path / "run.toml", listed, seeds=1, progress=False)
    assert [r.result.journal_sha256 for r in found.runs] == [r.result.journal_sha256 for r in same.runs]


def test_a_list_meets_every_combination_of_the_grid(tmp_path: Path) -> None:
    _, found = read_sweep(written(tmp_path, GRID + "[[sweep.choices]]\nfleet = { dropout = 0.1 }\n"))
    assert found is not None
    assert len(found.choices) == 4
    assert {"fleet.dropout": 0.1, "strategy.name": "fedbuff", "client.steps": 3} in found.choices


def test_the_command_has_them_side_by_side_and_goes_on(tmp_path: Path) -> None:
    written(tmp_path, GRID)
    first = answer(anabranch(tmp_path, "simulate", "run.toml", "--json"))
    assert sorted(len(row["seeds"]) for row in first["rows"]) == [2, 2, 2, 2]
    folder = tmp_path / "runs" / "run-fedasync-sweep"
    runs = {path.parent: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}
    assert len(runs) == 8
    assert answer(anabranch(tmp_path, "simulate", "run.toml", "--seeds", "2,4,5", "--json"))["rows"]
    after = {path.parent: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}
    assert {path: after[path] for path in runs} == runs
    assert len(after) == 12


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("[sweep]\nseed = 3\n", "unknown key 'seed' in .sweep.: it has seeds, parallel, on, grid, choices"),
        ("[sweep]\nseeds = []\n", r"sweep.seeds = \[\]: give how many"),
        ("[sweep]\non = 3\n", "sweep.on = 3: give one of processes, ray"),
        ("[sweep]\nparallel = 0\n", "sweep.parallel = 0: give how many runs at a time"),
        ("[sweep.grid]\nstrategy = 3\n", "'strategy' is no setting: write 'table.key'"),
        ("[sweep.grid]\nclient = { steps = 3 }\n", "client.steps = 3: give a list of values"),
        ("[sweep.grid]\nrun = { seed = [3, 4] }\n", "sweep.grid: run.seed: a sweep has .*sweep.seeds"),
        ("[[sweep.choices]]\n'run.seed' = 3\n", "sweep.choices: run.seed: a sweep has .*sweep.seeds"),
        ("[sweep.grid]\nclient = { stepz = [3] }\n", "did you mean 'steps'"),
        (
            "[sweep.grid]\nclient = { steps = [3] }\n[[sweep.choices]]\nclient = { steps = 2 }\n",
            "client.steps is in the grid and in a choice",
        ),
    ],
)
def test_what_is_wrong_is_said(sweep: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        ab.sweep(written(tmp_path, sweep), out=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_one_run_of_a_file_of_many_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, GRID)
    with pytest.raises(ConfigError, match="which is many runs"):
        ab.simulate(path)
    done = anabranch(tmp_path, "simulate", "run.toml", "--seed", "3", "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]) == (2, "ConfigError")
