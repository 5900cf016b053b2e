"""FedAvg by anabranch's simulator.

python benchmarks/peer_scripts/with_anabranch.py TASK.npz [light]

`light`: devices that have to wait sleep until they are called, a stack takes the whole fleet, updates have no
digests.
"""

from __future__ import annotations

import sys
from typing import Any

from turn import DIGITS, SharedWork, take_turn

import anabranch
from anabranch.core.config.tables import merge
from anabranch.simulation.run import open_simulation
from anabranch.workloads.digits import Digits
from anabranch.workloads.fashion_mnist import FashionMnist


def app_of(task: SharedWork) -> anabranch.App:
    """The App of the task's name, on the task's data."""

    class OnTask(Digits if task.problem == DIGITS else FashionMnist):
        def data(self, shard: anabranch.Shard) -> anabranch.Examples:
            if shard.role == "train":
                return anabranch.Examples(task.x[shard.index], task.y[shard.index])
            return anabranch.Examples(task.test_x, task.test_y)

    return OnTask()


def train(task: SharedWork, rounds: int) -> float:
    """Every device in every round."""
    devices, light = task.devices, sys.argv[2:] == ["light"]
    tables: dict[str, dict[str, Any]] = {
        "run": {"updates_max": rounds * devices, "evaluate_every_versions": 0, "keep_payloads": False},
        "fleet": {"clients": devices},
        "client": {
            "steps": task.epochs * task.y.shape[1] // task.batch_size,
            "batch_size": task.batch_size,
            "learning_rate": task.learning_rate,
        },
        "strategy": {"name": "fedavg", "clients_per_round": devices, "over_selection": 1.0},
    }
    if light:
        tables["run"]["payload_digest"] = "none"
        tables["fleet"] |= {"waiting": "called", "batch_devices": devices}
    with open_simulation(merge([("benchmark", tables)]), app=app_of(task)) as simulation:
        simulation.run()
        assert simulation.engine.counters.applied == rounds * devices
        return float(simulation.result(0.0).final_accuracy)


if __name__ == "__main__":
    take_turn(train)
