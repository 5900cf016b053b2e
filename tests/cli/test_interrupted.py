"""Ctrl-C, whenever it comes: one line and 130. What is interrupted sends the signal itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
        command, cwd=cwd, capture_output=True, text=True, timeout=120, start_new_session=True
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
