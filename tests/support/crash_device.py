"""A device process for the crash tests: `python crash_device.py ADDRESS CLIENT_ID STATE_DIR TASKS_MAX`.

Every local step adds one to every weight, so that an update is the number of its steps, and the model the
number of all that was applied. It tells its events as JSON lines.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.client.run import ClientOptions, run_client
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import App as Base
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.batches import batches

STEP_S = 0.002
SHAPE = (15, 20)
OWN = f"{__file__}:App"


class App(Base):
    """Counts its steps in its weights."""

    shape: tuple[int, ...] = SHAPE

    def model(self) -> Any:
        """One tensor."""
        return {"w": np.zeros(self.shape, np.float32)}

    def data(self, shard: Shard) -> Examples:
        """Nothing to learn from."""
        return Examples(np.zeros((4, 1), np.float32), np.zeros(4, np.int64))

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        """So many steps of a device that needs a while for each."""
        for _ in batches(len(examples), plan, seed):
            time.sleep(STEP_S)
            model["w"] += 1
        return {}


def main(address: str, client_id: str, state_dir: str, tasks_max: str, app: str = OWN) -> None:
    """Work until killed, or `tasks_max` tasks."""

    def tell(kind: str, **data: Any) -> None:
        sys.stdout.write(json.dumps({"kind": kind, **data}) + "\n")
        sys.stdout.flush()

    options = ClientOptions(
        app,
        address,
        client_id,
        state_dir=Path(state_dir),
        tasks_max=int(tasks_max),
        retry_base_s=0.05,
        retry_cap_s=0.5,
    )
    run_client(options, tell)


if __name__ == "__main__":
    main(*sys.argv[1:])
