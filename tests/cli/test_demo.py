"""The demo, small: a real server, real device processes, an evaluator, a report, a sound store."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from commands import answer, started
from nursery import COMMAND, PIPE, Process


def anabranch(*arguments: object) -> dict[str, Any]:
    """Run a command; returns its last JSON line."""
    return answer(commands.anabranch(Path.cwd(), *arguments, "--json"))


PUSHES = {
    "task": [],
    "overlap": ["--set", "client.push=overlap", "--set", "server.tasks_per_client=2"],
    "elastic": ["--strategy", "fedasync", "--set", "client.push=elastic"],
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(push, marks=() if push == "task" else pytest.mark.prove) for push in PUSHES],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("demo") / "run"
    # An exchange of the elastic mode brings the few steps since the last one.
    updates = 120 if request.param == "elastic" else 30
    sets = [
        "--set",
        f"run.updates_max={updates}",
        "--set",
        "fleet.examples_per_client=50",
        *PUSHES[request.param],
    ]
    done = started(
        out.parent, "demo", "--workload", "synthetic", "--clients", 2, "--out", out, *sets, "--json"
    )
    assert answer(done)["updates_applied"] == updates
    assert all(isinstance(json.loads(line), dict) for line in done.stdout.splitlines())
    return out


def test_it_learns_and_says_so(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    assert result["kind"] == "live"
    assert sum(c["updates"] > 0 for c in result["clients"].values()) == 2
    assert result["history"][-1]["version"] == result["versions"]
    assert result["final_accuracy"] > 0.25  # ten classes: a guess is right in one of ten
    assert "<svg" in (folder / "report.html").read_text()


def test_its_journal_replays(folder: Path) -> None:
    recorded = json.loads((folder / "result.json").read_text())
    replayed = anabranch("replay", folder)
    assert replayed["model_sha256"] == recorded["model_sha256"]
    assert replayed["journal_sha256"] == recorded["journal_sha256"]


def test_its_data_are_sound(folder: Path) -> None:
    report = anabranch("verify", folder / "server")
    assert report["problems"] == []
    assert report["model_sha256"] == json.loads((folder / "result.json").read_text())["model_sha256"]


def test_a_report_can_be_made_of_the_data_alone(folder: Path, tmp_path: Path) -> None:
    result = anabranch("report", folder / "server", "--out", tmp_path / "again")
    assert result["journal_sha256"] == json.loads((folder / "result.json").read_text())["journal_sha256"]


@pytest.mark.slow
def test_every_process_reads_the_data_where_the_demo_was_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nimport anabranch\n"
        "class Mine(anabranch.App):\n"
        "    def model(self): return {'w': np.zeros(np.load(self.data_path).shape[1])}\n"
        "    def data(self, shard): return np.load(self.data_path), np.ones(4)\n"
        "    def train(self, model, examples, plan, seed): model['w'] += 1.0\n"
        "    def evaluate(self, model, examples): return {'loss': float(len(examples))}\n"
    )
    np.save(tmp_path / "rows.npy", np.ones((4, 3)))
    few = ["--clients", 1, "--set", "run.updates_max=2", "--set", "strategy.buffer_size=1", "--json"]
    done = started(tmp_path, "demo", "--workload", "mine.py:Mine", "--data-path", "rows.npy", *few)
    assert answer(done)["updates_applied"] == 2


def test_a_demo_takes_the_app_whose_data_are_where_a_setting_says(tmp_path: Path) -> None:
    """Without the pictures there it is the digits', wherever else pictures are. It says so first."""
    (tmp_path / "elsewhere").mkdir()
    words = ("demo", "--clients", 1, "--set", "run.data_path=elsewhere")
    with Process(COMMAND, *words, cwd=tmp_path, stdout=PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("no Fashion-MNIST, so digits: ")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=600)
