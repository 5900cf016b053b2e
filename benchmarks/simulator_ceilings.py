"""What the simulator reaches of a bare loop that does the same work with nothing round it.

    python -m benchmarks.simulator_ceilings [--rounds 5]

The loop and the simulation take turns in one process; rates are of processor time, of all threads, and
medians of the rounds. The loop copies what a device would copy, trains the same models on batches of the same
sizes, hashes, checks and adds up; it has no clock, no events, no leases, no log and no choice of batches.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import anabranch
from anabranch.core.config.tables import Config
from anabranch.core.model.params import add_scaled
from anabranch.simulation.run import open_simulation
from benchmarks.fleet_speed import PARAMETERS, NoOp, settings

DEVICES = 100
BUFFER = 10  # updates in a version
ROUNDS = 5


@dataclass(frozen=True)
class Compared:
    """Tasks a processor second, of the bare loop and of the simulation, as medians; and of their ratios."""

    name: str
    bare: float
    ours: float
    ratio: float


def bare_tasks(count: int) -> None:
    """Tasks without training: a copy of the model, its delta, the payload, its SHA-256, a check, the fold."""
    model = np.zeros(PARAMETERS, np.float32)
    total = np.zeros_like(model)
    for number in range(count):
        own = model.copy()
        payload = np.subtract(own, model, out=own).tobytes()
        hashlib.sha256(payload).hexdigest()
        delta = np.frombuffer(payload, np.float32)
        if not max(-float(delta.min()), float(delta.max())) < np.inf:
            raise ValueError("not finite")
        add_scaled(total, 1.0, delta)
        if number % BUFFER == BUFFER - 1:
            model += total / np.float32(BUFFER)
            total.fill(0.0)


def simulated(app: anabranch.App, config: Config) -> tuple[int, float]:
    """Tasks of a simulation, and the processor time of its events."""
    with open_simulation(config, app=app) as simulation:
        began_s = time.process_time()
        simulation.run()
        return simulation.engine.counters.applied, time.process_time() - began_s


def compared(
    name: str, bare: Callable[[int], None], app: anabranch.App, config: Config, rounds: int
) -> Compared:
    """Both in turns, each once before it counts."""
    tasks = config.run.updates_max
    bare(tasks // 10)
    simulated(app, config)
    pairs = []
    for _ in range(rounds):
        began_s = time.process_time()
        bare(tasks)
        bare_rate = tasks / (time.process_time() - began_s)
        done, took_s = simulated(app, config)
        pairs.append((bare_rate, done / took_s))
    ratio = statistics.median(ours / bare_rate for bare_rate, ours in pairs)
    bare_rates, our_rates = zip(*pairs, strict=True)
    return Compared(name, statistics.median(bare_rates), statistics.median(our_rates), ratio)


def run_all(rounds: int = ROUNDS) -> list[Compared]:
    """Every kind of work."""
    no_training = f"no training, {PARAMETERS} parameters"
    return [compared(no_training, bare_tasks, NoOp(), settings(DEVICES, 2_000), rounds)]


def section(rounds: int = ROUNDS) -> str:
    """The figures as a section of docs/benchmarks.md."""
    return INTRODUCTION + "\n\n" + table(run_all(rounds)) + "\n"


def table(rows: list[Compared]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| work | bare loop, tasks a processor second | anabranch | of the loop |",
        "|---|---|---|---|",
        *(f"| {row.name} | {row.bare:.0f} | {row.ours:.0f} | **{row.ratio:.2f}** |" for row in rows),
    ]
    return "\n".join(lines)


INTRODUCTION = f"""### Beside a bare loop

The same work by a loop with nothing round it, and by a simulation of {DEVICES} devices, in turns, in one
process: tasks a second of processor time, of all threads, medians of {ROUNDS} rounds. Without training the
loop copies, hashes (SHA-256), checks and adds up each update."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    print(section(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
