"""The folders that runs leave, as a researcher meets them: nothing is overwritten, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import anabranch
from nursery import COMMAND, PIPE, Process

from anabranch.core.errors import OUTCOMES, ConfigError, DataError
from anabranch.reports.result import Result

SETS = ["--set", "run.workload=synthetic", "--set", "run.name=try", "--set", "fleet.examples_per_client=20"]


def simulated(cwd: Path, *arguments: object) -> str:
    done = anabranch(cwd, "simulate", *SETS, "--set", "run.updates_max=6", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Alpha swept over two seeds, one of the runs twice."""
    folder: Path = tmp_path_factory.mktemp("study")
    for alpha in (0.2, 0.9):
        for seed in (0, 1):
            asked = [
                "--strategy",
                "fedasync",
                "--set",
                f"strategy.alpha={alpha}",
                "--set",
                f"run.seed={seed}",
            ]
            simulated(folder, *asked)
    return folder


def test_settings_that_differ_get_folders_that_differ(place: Path) -> None:
    assert {p.name for p in (place / "runs").iterdir()} == {
        *("try-fedasync-seed0", "try-fedasync-seed0-2", "try-fedasync-seed1", "try-fedasync-seed1-2"),
    }
    alphas = [Result.read(p).config["strategy"]["alpha"] for p in sorted((place / "runs").glob("*seed0*"))]
    assert alphas == [0.2, 0.9]
    again = simulated(place, "--strategy", "fedasync", "--set", "strategy.alpha=0.2")
    assert "try-fedasync-seed0 has a run with the same settings: this one goes to" in again
    other = simulated(place, "--strategy", "fedasync", "--set", "strategy.alpha=0.5")
    assert "has a run with other settings (strategy.alpha): this one goes to" in other


def test_compare_groups_by_every_setting_but_the_seed_and_survives_bad_folders(place: Path) -> None:
    runs = sorted((place / "runs").iterdir())
    torn, empty = place / "torn", place / "empty"
    torn.mkdir()
    empty.mkdir()
    (torn / "result.json").write_text('{"strategy": "fedasy')
    done = anabranch(place, "compare", *runs, torn, empty, place / "nowhere", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(r["label"], r["seeds"]) for r in rows if r["settings"] != {"strategy.alpha": 0.5}] == [
        ("fedasync, alpha=0.2", [0, 1]),
        ("fedasync, alpha=0.9", [0, 1]),
    ]
    said = done.stderr
    assert all(f"left out: {folder}" in said for folder in (torn, empty, place / "nowhere"))
    assert "Traceback" not in said


def test_a_report_is_of_one_run_and_not_of_a_folder_of_some(place: Path) -> None:
    done = anabranch(place, "report", "runs")
    assert done.returncode == OUTCOMES[DataError].exit_code
    assert "name one of those, such as runs/try-fedasync-seed0\n" in done.stderr


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    for folders, words in (
        ([tmp_path], "result.json is missing: name the folder of a run"),
        ([tmp_path, tmp_path], "there is no finished run among these folders"),
    ):
        done = anabranch(tmp_path, "compare", *folders)
        assert done.returncode == OUTCOMES[DataError].exit_code
        assert words in done.stderr


@pytest.mark.parametrize(
    "what", [["simulate", "synthetic"], ["search", "synthetic"], ["demo", "--workload", "synthetic"]]
)
def test_an_explicit_folder_that_holds_a_run_is_an_error(place: Path, what: list[str]) -> None:
    folder = place / "runs" / "try-fedasync-seed0"
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    done = anabranch(place, *what, "--set", "run.updates_max=3", "--out", folder)
    assert done.returncode == OUTCOMES[ConfigError].exit_code
    assert f"{folder} holds a run already" in done.stderr
    assert "name another folder with --out" in done.stderr
    assert "warm-up" not in done.stdout, "it is said before anything is done"
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def answers(process: Process) -> list[dict[str, Any]]:
    said, _ = process.communicate(timeout=600)
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_simulation_leaves_its_report(tmp_path: Path, number: int, code: int) -> None:
    asked = (COMMAND, "simulate", *SETS, "--set", "run.updates_max=100000000", "--json")
    with Process(*asked, cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None
        while json.loads(process.stdout.readline()).get("version", 0) < 1:
            pass
        os.kill(process.pid, number)
        *_, result = answers(process)
    assert process.returncode == code
    folder = tmp_path / "runs" / "try-fedbuff-seed0"
    assert result["status"] == Result.read(folder).status == "interrupted"
    assert {"report.html", "final.safetensors"} <= {p.name for p in folder.iterdir()}
    assert anabranch(tmp_path, "replay", folder).returncode == 0
    assert anabranch(tmp_path, "report", folder).returncode == 0
    simulated(tmp_path)
    compared = anabranch(tmp_path, "compare", *(tmp_path / "runs").iterdir())
    assert compared.returncode == 0
    assert f"left out: {folder} was interrupted" in compared.stderr


def test_a_run_that_was_killed_is_named(tmp_path: Path) -> None:
    simulated(tmp_path)
    folder = tmp_path / "runs" / "try-fedbuff-seed0"
    (folder / "result.json").unlink()
    done = anabranch(tmp_path, "report", folder)
    assert done.returncode == OUTCOMES[DataError].exit_code
    assert "was killed before it could leave a result" in done.stderr
    assert "a Flower app goes on by `flwr run`" in done.stderr
    assert "try-fedbuff-seed0 has a run that was not finished: this one goes to" in simulated(tmp_path)


REGRESSION = """
import numpy as np

import anabranch


class App(anabranch.App):
    def model(self):
        return {"w": np.zeros(1, np.float32)}

    def data(self, shard):
        return anabranch.Examples(np.ones((4, 1), np.float32), np.ones((4, 1), np.float32))

    def train(self, model, examples, plan, seed):
        model["w"] += 0.1
        return {"steps": 1}

    def evaluate(self, model, examples):
        off = float(1 - model["w"][0])
        return {"loss": off**2, "mae": abs(off)}
"""


def test_a_run_without_accuracy_is_told_by_what_it_measures(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(REGRESSION)
    done = anabranch(tmp_path, "simulate", "app.py:App", "--set", "run.updates_max=20", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "accuracy" not in done.stdout
    assert "loss " in done.stdout
    assert (tmp_path / "run" / "best.safetensors").is_file()
    shown = anabranch(tmp_path, "compare", "run").stdout
    assert "loss" in shown
    assert "mae" in shown
    assert "accuracy" not in shown
