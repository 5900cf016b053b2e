"""A run that is judged by a metric of its App, on a server with caps of its own: as its user types it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import anabranch, answer, serving

from anabranch.core.errors import OUTCOMES, ManifestMismatch

APP = '''
"""Least squares; the devices' lines differ, so that none fits all of them."""

import os

import numpy as np

import anabranch


class Line(anabranch.App):
    def model(self):
        return {"w": np.zeros(2, np.float32)}

    def data(self, shard):
        x = np.random.default_rng([shard.index, len(shard.role)]).standard_normal((40, 2)).astype(np.float32)
        return x, x @ np.array([1.0, shard.index % 3], np.float32)

    def train(self, model, examples, plan, seed):
        for _ in range(5):
            error = examples.x @ model["w"] - examples.y
            model["w"] -= 0.1 * examples.x.T @ error / len(examples)
        return {"mse": float(np.mean(error**2)), "steps": 5}

    def evaluate(self, model, examples):
        error = (examples.x @ model["w"] - examples.y) ** 2
        near = np.abs(examples.x[:, 0]) < 1
        return {"mse": error.mean(), "mse[near]": error[near].mean(), "mse[far]": error[~near].mean()}


class Huge(Line):
    """What it sends is finite, and over the server's cap."""

    def train(self, model, examples, plan, seed):
        model["w"] += 100.0
        return {"mse": 1.0, "steps": 1}


class Wandering(Line):
    """It changes the working directory."""

    def data(self, shard):
        os.chdir("/")
        return super().data(shard)
'''
RUN = """
[run]
name = "judged"
workload = "line.py:Line"
metric = "mse"
mode = "min"
target = 0.9
updates_max = 6
[fleet]
clients = 3
[strategy]
name = "fedbuff"
buffer_size = 1
[limits]
delta_abs_max = 10.0
chunk_bytes_max = 8192
"""
LOCAL = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "line.py").write_text(APP)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def live(here: Path) -> dict[str, Any]:
    """The result of the run, with three devices, one whose updates nobody can use, and a follower."""
    assert anabranch(here, "init", "line.py:Line", "--out", "model").returncode == 0
    with serving(here, "run.toml", "--model", "model", *LOCAL) as served:

        def command(*words: object) -> str:
            done = anabranch(here, *words, "--server", served["address"])
            assert done.returncode == 0, done.stderr
            return done.stdout

        def measure() -> None:
            options = ("--admin", served["admin_address"], "--once", "--out", "measured.jsonl")
            command("evaluate", "line.py:Wandering", *options)

        measure()
        useless = command("client", "line.py:Huge", "--id", "device-9", "--tasks-max", 2)
        assert "2 tasks done" in useless
        for index in range(3):
            command("client", "line.py:Line", "--id", f"device-{index}", "--tasks-max", 2)
            measure()
    assert len((here / "measured.jsonl").read_text().splitlines()) == 4
    return answer(anabranch(here, "report", "anabranch-data", "--json"))


def simulated(here: Path) -> dict[str, Any]:
    return answer(anabranch(here, "simulate", "run.toml", "--out", "anabranch-data/run", "--json"))


@pytest.mark.parametrize("run", [live, simulated], ids=lambda run: run.__name__)
def test_a_run_is_judged_by_its_own_metric(run: Any, here: Path) -> None:
    result = run(here)
    measured = [point["metrics"]["mse"] for point in result["history"]]
    assert len(measured) > 2
    assert (result["metric"], result["mode"], result["target"]) == ("mse", "min", 0.9)
    assert (result["final_value"], result["best_value"]) == (measured[-1], min(measured))
    assert result["final_accuracy"] is None
    reached = next(point for point in result["history"] if point["metrics"]["mse"] <= 0.9)
    assert result["time_to_target_s"] == reached["time_s"]
    assert result["config"]["limits"]["delta_abs_max"] == 10.0

    journal = (here / "anabranch-data" / "run" / "journal.jsonl").read_text().splitlines()[1:]
    updates = [record for record in map(json.loads, journal) if record["kind"] == "update"]
    by_device = {u["client_id"]: u["metrics"]["mse"] for u in updates if not u.get("flaw")}
    last = result["history"][-1]["metrics"]
    check(fairness(result, "devices"), list(by_device.values()))
    check(fairness(result, "groups"), [last["mse[near]"], last["mse[far]"]])
    assert {
        c: share["metrics"]["mse"] for c, share in result["clients"].items() if share["updates"]
    } == by_device

    row = answer(anabranch(here, "compare", "anabranch-data/run", "--json"))["rows"][0]
    assert row["worst_tenths"]["mse over devices"]["mean"] == max(by_device.values())
    assert row["worst_tenths"]["mse over groups"]["mean"] == max(last["mse[near]"], last["mse[far]"])


def test_what_is_over_a_servers_cap_is_rejected_and_its_device_ends(here: Path) -> None:
    result = live(here)
    assert (result["updates_applied"], result["rejections"]) == (6, {"invalid": 2})
    assert result["clients"]["device-9"]["rejected"] == 2
    proved = answer(anabranch(here, "verify", "anabranch-data", "--json"))
    assert (proved["version"], proved["problems"]) == (6, [])


def fairness(result: dict[str, Any], over: str) -> dict[str, Any]:
    (found,) = (f for f in result["fairness"] if (f["metric"], f["over"]) == ("mse", over))
    return dict(found)


def check(found: dict[str, Any], values: Sequence[float]) -> None:
    """Against the definitions: of so few the worst tenth is the worst."""
    known = np.array(values)
    assert found["count"] == len(known)
    assert found["worst_tenth"] == found["greatest"] == known.max()
    told = [found[name] for name in ("mean", "deviation", "jain")]
    index = known.sum() ** 2 / (len(known) * (known**2).sum())
    assert np.allclose(told, [known.mean(), known.std(), index], rtol=1e-12)


def test_who_measures_by_another_app_is_told_what_differs_and_what_to_do(here: Path) -> None:
    (here / "cube.py").write_text(APP.replace("Line", "Cube").replace("np.zeros(2", "np.zeros(3"))
    assert anabranch(here, "init", "line.py:Line", "--out", "model").returncode == 0
    with serving(here, "run.toml", "--model", "model", *LOCAL) as said:
        other = "evaluate", "cube.py:Cube", "--server", said["address"], "--once"
        blind, told = anabranch(here, *other), anabranch(here, *other, "--admin", said["admin_address"])
    assert blind.returncode == told.returncode == OUTCOMES[ManifestMismatch].exit_code
    assert "another model than Cube, which has 1 tensor of 3 numbers: measure it by the App" in blind.stderr
    assert "--admin, the operators' port, has the tensor named that differs" in blind.stderr
    assert "enrol" not in blind.stderr, "which who measures never does"
    assert "the server w (2,) float32" in told.stderr
