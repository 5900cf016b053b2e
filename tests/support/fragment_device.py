"""A device process that trains three tensors.

    python fragment_device.py ADDRESS CLIENT_ID STATE_DIR TASKS_MAX

A local step adds to every weight a number of its own tensor and device, so that what comes of whom, and of
which part, cannot be taken for anything else. It tells its events as JSON lines.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import crash_device
import numpy as np

from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import App as Base
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.batches import batches

STEP_S = 0.002
SHAPES = {"a.w": (4, 5), "b.w": (7, 3), "c.w": (2, 2)}
OF_TENSORS = {"a.w": 1, "b.w": 8, "c.w": 64}


class App(Base):
    """Counts in its weights, with a digit for each device and tensor."""

    def model(self) -> Any:
        """Three tensors, none in one block with another."""
        return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}

    def data(self, shard: Shard) -> Examples:
        """Nothing to learn from but whose it is."""
        return Examples(np.full((4, 1), shard.index, np.float32), np.zeros(4, np.int64))

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        """So many steps of a device that needs a while for each."""
        device = 1 + int(examples.x[0, 0])
        for _ in batches(len(examples), plan, seed):
            time.sleep(STEP_S)
            for name, number in OF_TENSORS.items():
                model[name] += device * number
        return {}


if __name__ == "__main__":
    address, client_id, state_dir, tasks_max = sys.argv[1:]
    crash_device.main(address, client_id, state_dir, tasks_max, f"{__file__}:App")
