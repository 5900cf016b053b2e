"""Weights and Biases: a run of the project `anabranch`, or of `WANDB_PROJECT`.

Without a word it is offline, in `wandb/` of the run's folder (`wandb sync` sends it); `WANDB_MODE=online`
sends it at once. All is drawn against the version, and may be against what is under `run/`: time, bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import wandb

from anabranch.reports.tracking.run import Dated, TrackedRun

PROJECT = "anabranch"


class WeightsAndBiases(Dated):
    """See `Tracker`."""

    name: ClassVar[str] = "wandb"

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Begins a run of its own, whatever others go on in this process."""
        if run.folder is not None:
            run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=os.environ.get("WANDB_DIR", run.folder),
            name=run.name,
            config=dict(run.config),
            tags=[run.strategy, run.workload, run.kind],
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def metrics(self, version: int, values: Mapping[str, float]) -> None:
        """One row of its history."""
        self._run.log({"version": version, **self.dated(values)})

    def finish(self, result: Mapping[str, Any]) -> None:
        """Ends it."""
        if self._run is not None:
            self._run.finish(exit_code=int(result.get("status") == "interrupted"))
