"""Device tasks a second of `anabranch simulate`: without and with training, a million devices, Flower beside.

    python -m benchmarks.fleet_speed [--devices-max 1000000]

Without flwr, and without Ray, their rows are left out. Rates are of wall-clock time, and of processor time
where one process does the work: that one holds on a busy machine, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import anabranch
from anabranch.core.config.tables import Config, merge
from anabranch.core.content import UNNAMED
from anabranch.flower.app import FlowerApp
from anabranch.simulation.executors.base import Evaluation
from anabranch.simulation.run import Simulation, open_simulation
from anabranch.workloads.digits import Digits
from benchmarks.flower_simulation import BARE, FEDAVG, FOLDER, rounds_s
from benchmarks.simulator import NoTraining
from benchmarks.throughput import peak_rss_bytes

PARAMETERS = 100_000
EXAMPLES, STEPS, BATCH = 64, 8, 32


@dataclass(frozen=True)
class Measured:
    """So many tasks (or events) in so many seconds of the clock and of this process's processors.

    `cpu_s` is 0 where other processes did the work.
    """

    name: str
    devices: int
    tasks: int
    wall_s: float
    cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        """Tasks a second; of processor time where that is known."""
        return self.tasks / (self.cpu_s or self.wall_s)


class NoOp(NoTraining):
    """Four arrays of 100,000 numbers altogether, that come back as they went."""

    name = "no-op"

    def model(self) -> dict[str, np.ndarray[Any, Any]]:
        """Zeros."""
        return {f"w{i}": np.zeros(PARAMETERS // 4, np.float32) for i in range(4)}

    def data(self, shard: anabranch.Shard) -> anabranch.Examples:
        """One empty example."""
        del shard
        return anabranch.Examples(np.zeros((1, 1), np.float32), np.zeros(1, np.int64))


def settings(devices: int, updates: int, **fleet: Any) -> Config:
    """Everybody in training at a time; one virtual speed for each of eight groups of devices."""
    run = {"updates_max": updates, "evaluate_every_versions": 0, "keep_payloads": False}
    client = {"steps": STEPS, "batch_size": BATCH, "learning_rate": 0.05}
    fleet = {"clients": devices, "split": "draws", "examples_per_client": EXAMPLES, **fleet}
    tables = {"run": run, "fleet": fleet, "client": client}
    return merge([("benchmark", {**tables, "strategy": {"name": "fedbuff"}})])


def measure(name: str, app: anabranch.App, config: Config, workers: int = 0) -> Measured:
    """One simulation, from its first to its last event; what has to start is started before."""
    with open_simulation(config, app=app, workers=workers) as simulation:
        wait_for(simulation, workers)
        wall, cpu = time.perf_counter(), time.process_time()
        simulation.run()
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        applied = simulation.engine.counters.applied
    return Measured(name, config.fleet.clients, applied, wall_s, 0.0 if workers else cpu_s)


def wait_for(simulation: Simulation, workers: int) -> None:
    """Workers open their problem when they get their first work."""
    work = Evaluation(simulation.engine.vector, 0.0)
    for pending in [simulation.executor.evaluate(work) for _ in range(3 * workers)]:
        pending.result()


def no_training(devices: int) -> Iterator[Measured]:
    """The machinery alone, with a model of 100,000 parameters; then with updates that have no names."""
    config = settings(devices, 4_000)
    yield measure("anabranch, no training", NoOp(), config)
    yield measure("anabranch, no training, payload_digest none", NoOp(), unnamed(config))


def unnamed(config: Config) -> Config:
    """The same run, whose payloads are not hashed."""
    return replace(config, run=replace(config.run, payload_digest=UNNAMED))


def client_app(devices: int, steps: int, updates: int = 4_000) -> Measured:
    """The ClientApp that Flower's rows have, as it is."""
    name = "anabranch, the same ClientApp"
    tables = {"run": {"workload": f"flower:{FOLDER}"}, "flower": {"run_config": {"steps": steps}}}
    config = merge([("benchmark", settings(devices, updates).to_json()), ("benchmark", tables)])
    return measure(name, FlowerApp(FOLDER), config)


def training(devices: int) -> Iterator[Measured]:
    """Digits, one by one and in stacks."""
    app, updates = Digits(), 4_000
    measure("warm-up", app, settings(devices, devices, executor="batched"))
    yield measure("anabranch, serial", app, settings(devices, updates, executor="serial"))
    for stack in (1, 8, 64, 256):
        together = {"executor": "batched", "batch_devices": stack}
        yield measure(f"anabranch, batched, {stack} at a time", app, settings(devices, updates, **together))
    together = {"executor": "batched", "batch_devices": 32}
    yield measure(
        "anabranch, batched, 32 at a time, 2 workers", app, settings(devices, updates, **together), 2
    )
    if installed("ray"):
        yield measure("anabranch, Ray, 2 workers", app, settings(devices, updates, executor="ray"), workers=2)


@dataclass(frozen=True)
class Large:
    """A fleet of which one in a hundred trains at a time. Memory is the process's peak."""

    devices: int
    events: int
    setup_cpu_s: float
    run_cpu_s: float
    memory_bytes: int


def large(devices: int) -> Large:
    """In a process of its own, so that the memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_large, (devices,))


def _large(devices: int) -> Large:
    run = {"updates_max": max(devices // 20, 1_000), "evaluate_every_versions": 0, "keep_payloads": False}
    tables: dict[str, dict[str, Any]] = {
        "run": run,
        "fleet": {"clients": devices, "step_time_s": 1.0, "waiting": "called"},
        "server": {"concurrency": max(1, devices // 100)},
    }
    started = time.process_time()
    with open_simulation(merge([("benchmark", tables)]), app=NoTraining()) as simulation:
        ready = time.process_time()
        simulation.run()
        done = time.process_time()
        memory_bytes = peak_rss_bytes(os.getpid())
        return Large(devices, simulation.clock.events, ready - started, done - ready, memory_bytes)


def installed(*packages: str) -> bool:
    """Whether all of them are."""
    return all(importlib.util.find_spec(package) is not None for package in packages)


def flower(devices: int, steps: int) -> Iterator[Measured]:
    """Flower's simulation of the same devices, in the same run."""
    rounds = {100: 5, 1_000: 2}.get(devices, 1)
    ways = [(FEDAVG, "Flower, FedAvg")]
    if devices <= 1_000:  # its pulls name all that they wait for: 10,000 had not ended in five minutes
        ways.append((BARE, "Flower, bare loop"))
    for how, name in ways:
        if seconds := rounds_s(devices, rounds, steps, how):
            yield Measured(name, devices, devices * len(seconds), sum(seconds))


def section(devices_max: int = 1_000_000) -> str:
    """The figures as a section of docs/benchmarks.md."""
    blocks = [INTRODUCTION]
    for devices in (100, 1_000):
        rows = [*no_training(devices), *([client_app(devices, 0)] if installed("flwr") else [])]
        blocks.append(f"### {devices} devices, no training\n\n" + table(devices, 0, rows))
        rows = [*training(devices), *([client_app(devices, STEPS)] if installed("flwr") else [])]
        blocks.append(f"### {devices} devices, training on digits\n\n" + table(devices, STEPS, rows))
    if devices_max:
        blocks.append("### A large fleet, one in a hundred in training\n\n" + large_table(devices_max))
    return "\n\n".join(blocks) + "\n"


def ten_thousand() -> str:
    """The figures of 10,000 devices, a section of their own: one round of Flower's takes minutes."""
    devices = updates = 10_000
    together = {"executor": "batched", "batch_devices": 64}
    measure("warm-up", Digits(), settings(devices, 1_000, **together))
    rows = [measure("anabranch, batched, 64 at a time", Digits(), settings(devices, updates, **together))]
    if installed("flwr"):
        rows.append(client_app(devices, STEPS, updates))
    return f"{TEN_THOUSAND}\n\n{table(devices, STEPS, rows)}\n"


def table(devices: int, steps: int, rows: list[Measured]) -> str:
    """The figures, Flower's first; ratios are of the clock's time, to each of Flower's."""
    theirs = list(flower(devices, steps)) if installed("flwr", "ray") else []
    names = [f"times {m.name}" for m in theirs]
    lines = [
        " | ".join(["| what | tasks | tasks a second | of processor time", *names]) + " |",
        "|---" * (4 + len(names)) + "|",
    ]
    for m in [*theirs, *rows]:
        wall = m.tasks / m.wall_s
        processor = f"{m.tasks / m.cpu_s:.0f}" if m.cpu_s else "-"
        ratios = [f"{wall * base.wall_s / base.tasks:.1f}" for base in theirs]
        lines.append(" | ".join([f"| {m.name} | {m.tasks} | {wall:.0f} | {processor}", *ratios]) + " |")
    return "\n".join(lines)


def large_table(devices_max: int) -> str:
    """A tenth of the devices, then all of them."""
    lines = [
        "| devices | events | events a second of processor time | memory, peak | bytes a device | start, s |",
        "|---|---|---|---|---|---|",
    ]
    for devices in (devices_max // 10, devices_max):
        m = large(devices)
        lines.append(
            f"| {m.devices} | {m.events} | {m.events / m.run_cpu_s:.0f} | {m.memory_bytes / 1e9:.2f} GB |"
            f" {m.memory_bytes / m.devices:.0f} | {m.setup_cpu_s:.0f} |"
        )
    return "\n".join(lines)


INTRODUCTION = f"""## Speed of the simulator

Tasks a second, from the grant to the folded update: without training, of a model of {PARAMETERS}
parameters, and with training on digits (4,810 parameters; {STEPS} steps of {BATCH} of a device's {EXAMPLES}
images). Every device is in training at a time. Flower: its simulation engine (Ray, one CPU a client, as many
actors as there are cores), with its FedAvg, and with a loop over its Grid that adds nothing up. Its first
round, in which Ray starts, does not count."""

TEN_THOUSAND = """## The simulator beside Flower, 10,000 devices

The same training on digits, with 10,000 devices in training at a time; a round of Flower's after the one in
which Ray starts. Without its bare loop, whose pulls name all that they wait for: two rounds of it had not
ended in five minutes. Without the fleet that trains nothing: that is 10,000 models of 0.4 MB on their way."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices-max", type=int, default=1_000_000, help="0: leave it out")
    arguments = parser.parse_args()
    print(section(arguments.devices_max))


if __name__ == "__main__":
    main()
