"""A tuning that may kill its own process in the middle of a run: what a test starts, again and again.

    python killed_tuning.py OUT KILL_AT_MEASUREMENT

Measurement 0 kills nobody.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import anabranch as ab
from anabranch.workloads.app import Examples
from anabranch.workloads.synthetic import Synthetic

RANGES: dict[str, Any] = {"client.learning_rate": [0.03, 0.3], "strategy.buffer_size": [1, 2, 4]}
UPDATES = 12


class Measured(Synthetic):
    """Counts its measurements, and ends its process at one of them."""

    def __init__(self, kill_at: int = 0) -> None:
        super().__init__()
        self.kill_at, self.measured = kill_at, 0

    def evaluate(self, model: Any, examples: Examples) -> dict[str, float]:
        self.measured += 1
        if self.measured == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate(model, examples)


def run(out: Path, kill_at: int = 0) -> tuple[ab.Tuning, int]:
    """Begin or go on; the tuning, and how many versions were measured."""
    app = Measured(kill_at)
    found = ab.tune(
        app,
        RANGES,
        defaults=False,
        trials=4,
        seeds=1,
        fresh_seeds=2,
        out=out,
        progress=False,
        fleet=ab.Fleet(clients=3, examples_per_client=40),
        until=ab.Until(updates=UPDATES),
    )
    return found, app.measured


if __name__ == "__main__":
    import killed_tuning  # its App is of the module then, as it is for a test

    folder, measurement = sys.argv[1:]
    killed_tuning.run(Path(folder), int(measurement))
