"""Ctrl-C, whenever it comes: one line and 130. What is interrupted sends the signal itself."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import anabranch

# The first look for a module sends the signal, then the command runs on as it does.
DURING_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["anabranch", *{arguments!r}]
from anabranch.cli.main import main
main()
"""

APP = """
import os, signal
import numpy as np
import anabranch

class App(anabranch.App):
    def model(self):
        return {"w": np.zeros(2)}
    def data(self, shard):
        return anabranch.Examples(np.ones((4, 2)), np.ones(4))
    def train(self, model, examples, plan, seed):
        model["w"] += 1
        try:
            open("pressed", "x").close()  # once, whoever is the first
        except FileExistsError:
            return
        os.killpg(os.getpgid(0), signal.SIGINT)
    def evaluate(self, model, examples):
        return {"accuracy": 1.0, "loss": 0.0}
"""


def interrupted(code: str | None, *arguments: str, cwd: Path) -> str:
    """Run it in a process group of its own, as a terminal does, and see how it ends; what it has printed."""
    command = [sys.executable, *(["-c", code] if code else ["-m", "anabranch.cli.main"]), *arguments]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=600, start_new_session=True
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    return done.stdout


@pytest.mark.parametrize(
    "module", ["anabranch.cli.program", "typer", "numpy", "anabranch.strategies.registry"]
)
def test_while_the_command_line_is_loaded(module: str, tmp_path: Path) -> None:
    code = DURING_IMPORT.format(module=module, arguments=["config", "show"])
    assert interrupted(code, cwd=tmp_path) == ""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("torch", ["init", "digits"]),
        ("anabranch.client.run", ["client", "synthetic"]),
        ("anabranch.server.app", ["server"]),
    ],
)
def test_while_a_command_is_loaded(module: str, arguments: list[str], tmp_path: Path) -> None:
    assert interrupted(DURING_IMPORT.format(module=module, arguments=arguments), cwd=tmp_path) == ""


# Of two workers one may train before the other has evaluated the first version, or has been started at all.
@pytest.mark.parametrize(("workers", "says"), [("0", "0 updates"), ("2", "getting 2 devices ready")])
def test_while_devices_train(workers: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(APP)
    settings = ["--set", "run.workload=mine.py:App", "--set", "run.updates_max=9", "--set", "fleet.clients=2"]
    printed = interrupted(None, "simulate", *settings, "--workers", workers, cwd=tmp_path)
    assert says in printed
    assert "Traceback" not in printed


LONG = """
[run]
workload = "mine.py:App"
updates_max = 12
evaluate_every_versions = 1
[fleet]
clients = 2
[strategy]
name = "fedasync"
"""


# In its fourth training.
COUNTING = "        self.done = getattr(self, 'done', 0) + 1\n        if self.done < 4:\n            return\n"
LATER = APP.replace("        try:\n", COUNTING + "        try:\n")


def digests_of(printed: str) -> tuple[str, str]:
    result = json.loads(printed.splitlines()[-1])
    return result["journal_sha256"], result["model_sha256"]


def test_a_run_says_how_it_goes_on_and_does(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LATER)
    (tmp_path / "run.toml").write_text(LONG)
    printed = interrupted(None, "simulate", "run.toml", "--out", "runs/it", cwd=tmp_path)
    said = next(line.strip() for line in printed.splitlines() if "--resume" in line)
    assert said == "anabranch simulate run.toml --out runs/it --resume"
    refused = anabranch(tmp_path, "simulate", "run.toml", "--out", "runs/it")
    assert (refused.returncode, "go on with it by --resume" in refused.stderr) == (2, True), refused.stderr
    other = anabranch(tmp_path, *shlex.split(said)[1:], "--set", "client.epochs=3")
    assert (other.returncode, "client.epochs is 1 there and 3 here" in other.stderr) == (2, True), (
        other.stderr
    )
    assert "interrupted" not in other.stdout
    went_on = anabranch(tmp_path, *shlex.split(said)[1:], "--json")
    whole = anabranch(tmp_path, "simulate", "run.toml", "--out", "runs/whole", "--json")
    assert (went_on.returncode, whole.returncode) == (0, 0), went_on.stderr + whole.stderr
    assert digests_of(went_on.stdout) == digests_of(whole.stdout)
    again = anabranch(tmp_path, *shlex.split(said)[1:], "--json")
    assert digests_of(again.stdout) == digests_of(whole.stdout), "one that has ended is told again"


def test_an_app_that_was_changed_meanwhile_does_not_go_on(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LATER)
    (tmp_path / "run.toml").write_text(LONG)
    interrupted(None, "simulate", "run.toml", "--out", "it", cwd=tmp_path)
    (tmp_path / "mine.py").write_text(LATER.replace('model["w"] += 1', 'model["w"] += 2'))
    refused = anabranch(tmp_path, "simulate", "run.toml", "--out", "it", "--resume")
    assert (refused.returncode, "the code of mine.py:App has changed" in refused.stderr) == (2, True)
    commented = "# A comment is no change.\n" + LATER
    (tmp_path / "mine.py").write_text(commented)
    assert anabranch(tmp_path, "simulate", "run.toml", "--out", "it", "--resume").returncode == 0
    (tmp_path / "mine.py").write_text(commented.replace('model["w"] += 1', 'model["w"] += 2'))
    told = anabranch(tmp_path, "simulate", "run.toml", "--out", "it", "--resume")
    assert (told.returncode, "has ended: the code of mine.py:App has changed" in told.stderr) == (2, True)
    (tmp_path / "mine.py").write_text(LATER)
    assert anabranch(tmp_path, "simulate", "run.toml", "--out", "it", "--resume").returncode == 0
