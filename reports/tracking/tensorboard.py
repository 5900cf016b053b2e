"""TensorBoard: event files in `tensorboard/` of the run's folder, or of `TENSORBOARD_LOGDIR`.

The x axis is the version; time, updates and bytes are scalars beside the metrics, under `run/`. The files are
written by tensorboardX, which needs neither torch nor TensorBoard itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tensorboardX import SummaryWriter

from anabranch.core.errors import ConfigError
from anabranch.reports.tracking.run import Dated, TrackedRun


class TensorBoard(Dated):
    """See `Tracker`."""

    name: ClassVar[str] = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        """Opens the file. Raises `ConfigError` where there is no folder for it."""
        self._writer = SummaryWriter(str(_folder(run)))
        self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1, default=str)}\n```")

    def metrics(self, version: int, values: Mapping[str, float]) -> None:
        """A scalar of each."""
        for name, value in self.dated(values).items():
            self._writer.add_scalar(name, value, version)
        self._writer.flush()

    def finish(self, result: Mapping[str, Any]) -> None:  # noqa: ARG002 - the contract's
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


def _folder(run: TrackedRun) -> Path:
    if (elsewhere := os.environ.get("TENSORBOARD_LOGDIR")) is not None:
        return Path(elsewhere) / f"{run.name}-{run.strategy}-{run.seed}"
    if run.folder is None:
        raise ConfigError("the tracker tensorboard: this run has no folder: set TENSORBOARD_LOGDIR")
    return run.folder / "tensorboard"
