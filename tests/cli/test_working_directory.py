"""An App that changes the working directory, as scripts do: what a command writes lies where it was typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import anabranch, answer, serving

APP = """
import os

import numpy as np

import anabranch

WHERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "numbers")
os.chdir(WHERE)


class Line(anabranch.App):
    def model(self):
        return {"w": np.zeros(2, np.float32)}

    def data(self, shard):
        x = np.loadtxt("x.txt", dtype=np.float32)  # where it has gone to
        return x, x @ np.array([1.0, 2.0], np.float32)

    def train(self, model, examples, plan, seed):
        model["w"] -= 0.1 * examples.x.T @ (examples.x @ model["w"] - examples.y) / len(examples)

    def evaluate(self, model, examples):
        return {"loss": ((examples.x @ model["w"] - examples.y) ** 2).mean()}
"""
LATE = APP.replace("os.chdir(WHERE)\n", "").replace(
    "        x = np.load", "        os.chdir(WHERE)\n        x = np.load"
)
PART = """
import os

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "elsewhere"))


class Quiet:
    name = "quiet"

    def start(self, run): ...

    def metrics(self, version, values): ...

    def finish(self, result): ...
"""
STRATEGY = """
import os
from dataclasses import dataclass
from typing import ClassVar
from anabranch.strategies.buffer import BufferStrategy

@dataclass(frozen=True)
class Goes(BufferStrategy):
    name: ClassVar[str] = "goes"

    def weight(self, update, context):
        os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "elsewhere"))
        return 1.0
"""


@pytest.fixture(params=[APP, LATE], ids=["when it is loaded", "when it is asked for data"])
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "line.py").write_text(request.param)
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "x.txt").write_text("1 0\n0 1\n1 1\n")
    return tmp_path


def test_what_commands_write_lies_where_they_were_typed(here: Path) -> None:
    words = "--updates", 6, "--clients", 2, "--out", "runs/mine", "--json"
    simulated = answer(anabranch(here, "simulate", "line.py:Line", *words))
    assert simulated["updates_applied"] == 6
    assert (here / "runs" / "mine" / "report.html").exists()
    seeds = anabranch(here, "simulate", "line.py:Line", *words[:4], "--seeds", "0..1", "--out", "runs/two")
    assert seeds.returncode == 0, seeds.stderr
    assert (here / "runs" / "two" / "compare.html").exists()
    begun = anabranch(here, "init", "line.py:Line", "--out", "model")
    assert begun.returncode == 0, begun.stderr
    assert (here / "model" / "manifest.json").exists()
    assert [path.name for path in (here / "numbers").iterdir()] == ["x.txt"]


def test_a_part_of_ones_own_that_goes_elsewhere_when_it_is_loaded_takes_no_command_along(
    tmp_path: Path,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "part.py").write_text(PART)
    for words in (("init",), ("search", "--updates", 6, "--warm-up-updates", 0)):
        command, *more = words
        setting = 'run.trackers=["part.py:Quiet"]'
        done = anabranch(tmp_path, command, "synthetic", *more, "--out", command, "--set", setting)
        assert done.returncode == 0, done.stderr
        assert any((tmp_path / command).iterdir())
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_strategy_that_goes_elsewhere_takes_no_replay_along(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "part.py").write_text(STRATEGY)
    named = "--strategy", "part.py:Goes"
    simulated = answer(
        anabranch(tmp_path, "simulate", "synthetic", *named, "--updates", 12, "--out", "run", "--json")
    )
    replayed = anabranch(tmp_path, "replay", "run", "--load-code")
    assert replayed.returncode == 0, replayed.stderr
    assert simulated["model_sha256"] in replayed.stdout
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_strategy_that_goes_elsewhere_takes_no_server_along(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "part.py").write_text(STRATEGY)
    assert anabranch(tmp_path, "init", "synthetic", "--out", "model").returncode == 0
    ports = "--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0"
    words = "--model", "model", "--data-dir", "data", "--strategy", "part.py:Goes", *ports
    with serving(tmp_path, *words) as said:
        device = "--server", said["address"], "--id", "device-0", "--tasks-max", 8
        done = anabranch(tmp_path, "client", "synthetic", *device)
        assert (done.returncode, "8 updates answered" in done.stdout) == (0, True), done.stdout + done.stderr
        status = answer(anabranch(tmp_path, "admin", "status", "--admin", said["admin_address"], "--json"))
        assert status["version"] == 8
    sound = anabranch(tmp_path, "verify", "data", "--load-code")
    assert (sound.returncode, "data: sound. Version 8" in sound.stdout) == (0, True), sound.stderr
    assert not any((tmp_path / "elsewhere").iterdir())
