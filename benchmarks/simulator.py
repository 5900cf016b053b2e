"""Events a second of the simulator, without and with training.

    python -m benchmarks.simulator

Without training (a trainer that returns zeros) the figure is the machinery's own: event queue, sessions,
engine, journal. The ceiling of the same run is the bare event queue. With training it is the share of the
time that is left for learning.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import anabranch
from anabranch.core.config.tables import Config, merge
from anabranch.core.model.updates import LocalPlan
from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.run import open_simulation

DEVICES, EVENTS = 1_000, 200_000  # the latter of a queue alone
TASKS = 20_000


@dataclass(frozen=True)
class Measured:
    """Events and seconds of one run; `queue` is what the bare event queue does in a second."""

    name: str
    events: int
    updates: int
    wall_s: float

    @property
    def rate(self) -> float:
        """Events a second."""
        return self.events / self.wall_s


class NoTraining(anabranch.App):
    """A model of one number that learns nothing, in no time."""

    name = "no-training"

    def model(self) -> dict[str, np.ndarray[Any, Any]]:
        """One number."""
        return {"w": np.zeros(1, np.float32)}

    def data(self, shard: anabranch.Shard) -> anabranch.Examples:
        """Ten empty examples."""
        del shard
        return anabranch.Examples(np.zeros((10, 1), np.float32), np.zeros(10, np.int64))

    def train(self, model: Any, examples: Any, plan: LocalPlan, seed: int) -> dict[str, float]:
        """Nothing."""
        del model, examples, plan, seed
        return {}

    def evaluate(self, model: Any, examples: Any) -> dict[str, float]:
        """Nothing."""
        del model, examples
        return {"accuracy": 0.0, "loss": 0.0}


def config(strategy: str, **params: Any) -> Config:
    """A fleet whose devices poll, train, push and send heartbeats."""
    return merge(
        [
            (
                "benchmark",
                {
                    "run": {"updates_max": TASKS, "evaluate_every_versions": 0, "keep_payloads": False},
                    "fleet": {"clients": DEVICES, "step_time_s": 1.0},
                    "server": {"concurrency": DEVICES // 2},
                    "strategy": {"name": strategy, **params},
                },
            )
        ]
    )


def measure(name: str, settings: Config, app: anabranch.App | None) -> Measured:
    """One simulation, from its first to its last event."""
    with open_simulation(settings, app=app) as simulation:
        started = time.perf_counter()
        simulation.run()
        wall_s = time.perf_counter() - started
        return Measured(name, simulation.clock.events, simulation.engine.counters.applied, wall_s)


def bare_queue() -> Measured:
    """The ceiling: a queue of actions that do nothing but enter the next."""
    clock = VirtualClock()
    left = EVENTS

    def act() -> None:
        nonlocal left
        left -= 1
        if left > 0:
            clock.at(clock.now + 1.0, act)

    action: Callable[[], None] = act
    for _ in range(DEVICES):
        clock.at(0.0, action)
    started = time.perf_counter()
    clock.run()
    return Measured("bare event queue", clock.events, 0, time.perf_counter() - started)


def run_all() -> list[Measured]:
    """The ceiling, then the machinery under two strategies."""
    return [
        bare_queue(),
        measure("fedbuff, no training", config("fedbuff"), NoTraining()),
        measure("fedasync, no training", config("fedasync"), NoTraining()),
    ]


def table(rows: list[Measured]) -> str:
    """The figures as a Markdown table."""
    ceiling = rows[0].rate
    lines = [
        "| what | events | events a second | of the ceiling | updates a second |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {m.name} | {m.events} | {m.rate:.0f} | {m.rate / ceiling:.3f} | {m.updates / m.wall_s:.0f} |"
        for m in rows
    ]
    return "\n".join(lines)


def section() -> str:
    """The page's."""
    return f"""## The simulator's events

{DEVICES} devices that poll, train (nothing), push and send heartbeats, half of them in
training at a time.

{table(run_all())}
"""


def main() -> None:
    """Measure and print."""
    print(table(run_all()))


if __name__ == "__main__":
    main()
