"""A simulation that may kill its own process: what a test of runs that go on starts, again and again.

    python broken_off.py VARIANT OUT KILL_AT_VERSION

Version 0 kills nobody, and -1 as soon as the run's result is there.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
from fleets import config
from rough import ALL

from anabranch.core.config.tables import Config, merge
from anabranch.core.model.updates import LocalPlan
from anabranch.reports.result import Result
from anabranch.simulation.checkpoint import Checkpoint
from anabranch.simulation.run import RunProgress, simulate
from anabranch.workloads.app import Examples
from anabranch.workloads.synthetic import Synthetic

CHECKPOINT_S = 3.0
ENDED = -1  # in the place of a version
ROUGH = {"dropout": 0.2, "availability": 0.7, "availability_period_s": 15.0, "up_mbps": 1.0}
FEEDBACK = "ef(0.9)|topk(0.1)|int8|gaps|zstd"
STACKED = {
    "fleet": {"clients": 12, "executor": "batched", "batch_devices": 4},
    "run": {"workload": "digits", "virtual_s_max": 12.0},
}
OVERLAP = {
    "client": {"push": "overlap"},
    "server": {"tasks_per_client": 2},
    "uplink": {"codec": FEEDBACK},
    "fleet": ROUGH,
}
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {  # strategy, tables, workers
    "feedback": ("fedasync", {"uplink": {"codec": FEEDBACK}, "fleet": ROUGH}, 0),
    "kept": ("fedbuff", {"run": {"workload": "kept"}, "model": {"buffers": "local"}, "fleet": ROUGH}, 0),
    "processes": ("fedbuff", {"uplink": {"codec": FEEDBACK}}, 1),
    "batched": ("fedbuff", STACKED, 0),
    "stacks of workers": ("fedbuff", STACKED, 2),
    "elastic": ("fedasync", {"client": {"push": "elastic", "push_when": "interval", "push_steps": 3}}, 0),
    "overlap": ("fedbuff", OVERLAP, 0),
    "lossy downlink": ("fedbuff", {"downlink": {"codec": "int8|zstd"}, "uplink": {"codec": FEEDBACK}}, 0),
    "robust": (
        "fedbuff",
        {"robust": {"rule": "krum"}, "fleet": {"attackers": 0.2, "attack": "sign_flip", **ROUGH}},
        0,
    ),
    "faults": ("fedasync", {"faults": ALL, "uplink": {"codec": FEEDBACK}}, 0),
}


class Keeping(Synthetic):
    """Keeps a number from one training of a device to the next, which goes into its weights, and a buffer."""

    name = "kept"

    def buffers(self, model: Any) -> list[str]:
        """What no other device gets."""
        return ["output.bias"]

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        before = int(self.kept or b"0")
        self.kept = str(before + 1).encode()
        found = super().train(model, examples, plan, seed)
        model["hidden.bias"] += np.float32(0.01 * before)
        return found


def settings_of(variant: str) -> Config:
    """A run of thirty virtual seconds, in which versions are measured as they come."""
    strategy, tables, _ = VARIANTS[variant]
    run = {"virtual_s_max": 30.0, "evaluate_every_versions": 1, "workload": "synthetic"}
    if tables.get("run", {}).get("workload") == "kept":
        tables = {**tables, "run": {}}
    return merge([("plain", config(strategy).to_json()), ("run", {"run": run}), ("variant", tables)])


def run(variant: str, out: Path, kill_at: int = 0, seed: int = 0) -> Result:
    """Begin or go on."""

    def kill(progress: RunProgress) -> None:
        if 0 < kill_at <= progress.version:
            os.kill(os.getpid(), signal.SIGKILL)

    if kill_at == ENDED:  # what is removed goes when the result is there
        setattr(Checkpoint, "remove", lambda _: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010

    settings = merge([("all", settings_of(variant).to_json()), ("seed", {"run": {"seed": seed}})])
    app = Keeping() if settings.run.workload == "synthetic" and variant == "kept" else None
    workers = VARIANTS[variant][2]
    return simulate(settings, out, app, workers, kill, checkpoint_s=CHECKPOINT_S, resume=True)


if __name__ == "__main__":
    import broken_off  # its App is of the module then, as it is for a test

    name, folder, version = sys.argv[1:]
    broken_off.run(name, Path(folder), int(version))
