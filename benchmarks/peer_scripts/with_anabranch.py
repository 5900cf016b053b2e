"""FedAvg by anabranch's simulator.

python benchmarks/peer_scripts/with_anabranch.py TASK.npz
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from turn import DIGITS, SharedWork, take_turn

import anabranch
from anabranch.core.config.tables import merge
from anabranch.simulation.executors.base import Evaluation
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


def train(task: SharedWork, rounds: int) -> Callable[[], float]:
    """Every device in every round."""
    devices = task.devices
    tables = {
        "run": {"updates_max": rounds * devices, "evaluate_every_versions": 0, "keep_payloads": False},
        "fleet": {"clients": devices},
        "client": {
            "steps": task.epochs * task.y.shape[1] // task.batch_size,
            "batch_size": task.batch_size,
            "learning_rate": task.learning_rate,
        },
        "strategy": {"name": "fedavg", "clients_per_round": devices, "over_selection": 1.0},
    }
    stack = ExitStack()
    simulation = stack.enter_context(open_simulation(merge([("benchmark", tables)]), app=app_of(task)))
    simulation.run()
    assert simulation.engine.counters.applied == rounds * devices

    def accuracy() -> float:
        with stack:
            wanted = Evaluation(simulation.engine.vector, 0.0)
            return float(simulation.executor.evaluate(wanted).result()["accuracy"])

    return accuracy


if __name__ == "__main__":
    take_turn(train)
