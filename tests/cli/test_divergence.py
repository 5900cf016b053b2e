"""A run of which nothing comes, as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

from commands import anabranch

from anabranch.core.errors import OUTCOMES, Diverged

APP = """
import numpy as np
import anabranch


class App(anabranch.App):
    def model(self):
        return {"w": np.zeros(3, np.float32)}

    def data(self, shard):
        return anabranch.Examples(np.zeros((8, 1), np.float32), np.zeros(8, np.int64))

    def train(self, model, examples, plan, seed):
        model["w"] -= np.float32(np.inf)
        return {"loss": 0.0}

    def evaluate(self, model, examples):
        return {"accuracy": 0.0, "loss": 0.0}
"""
SETTINGS = """
[run]
workload = "{app}:App"
updates_max = 20
[fleet]
clients = 3
"""


def test_a_simulation_that_diverges_ends_with_a_reason_and_a_code(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "run.toml").write_text(SETTINGS.format(app=tmp_path / "app.py"))
    plain = anabranch(tmp_path, "simulate", "run.toml", "--out", "run")
    assert plain.returncode == OUTCOMES[Diverged].exit_code == 41
    said = " ".join(plain.stderr.split())
    assert said.startswith("100 updates rejected as invalid. device-0000: update")
    assert " error: the last 100 updates were all rejected" in said
    assert (
        "3 values that are not finite, the first in tensor 'w'): learning rate too large, or NaN in the data?"
        in said
    )
    assert "100 rejected" in plain.stdout
    assert "getting 3 devices ready" in plain.stdout, "something is said before anything is measured"
    assert (tmp_path / "run" / "report.html").is_file()

    for_programs = anabranch(tmp_path, "simulate", "run.toml", "--out", "json", "--json")
    assert for_programs.returncode == 41
    *_, result, error = [json.loads(line) for line in for_programs.stdout.splitlines()]
    assert result["given_up"] == error["detail"]
    assert error["error"] == "Diverged"
