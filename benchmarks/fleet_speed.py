"""Device tasks a second of `anabranch simulate`: without and with training, a million devices, Flower beside.

    python -m benchmarks.fleet_speed [--devices-max 1000000]

Without flwr, and without Ray, their rows are left out. Rates are of wall-clock time, and of processor time
where one process does the work: that one holds on a busy machine, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import anabranch
from anabranch.core.config import Config, merge
from anabranch.core.rng import stream
from anabranch.core.updates import LocalPlan
from anabranch.flower.app import FlowerApp
from anabranch.simulation.run import open_simulation
from anabranch.workloads.digits import Digits
from benchmarks.simulator import NoTraining
from benchmarks.throughput import peak_rss_bytes

FLOWER = Path(__file__).with_name("flower_simulation.py")
ECHO = Path(__file__).with_name("flower_echo")  # Flower's app, for Flower and for us
PARAMETERS = 100_000
EXAMPLES, STEPS, BATCH = 64, 8, 32
FLOWER_S_MAX = 540.0


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


class NoOp(anabranch.App):
    """Four arrays of 100,000 numbers altogether, that come back as they went."""

    name = "no-op"

    def model(self) -> dict[str, np.ndarray[Any, Any]]:
        """Zeros."""
        return {f"w{i}": np.zeros(PARAMETERS // 4, np.float32) for i in range(4)}

    def data(self, shard: anabranch.Shard) -> anabranch.Examples:
        """One empty example."""
        del shard
        return anabranch.Examples(np.zeros((1, 1), np.float32), np.zeros(1, np.int64))

    def train(self, model: Any, examples: Any, plan: LocalPlan, seed: int) -> dict[str, float]:
        """Nothing."""
        del model, examples, plan, seed
        return {}

    def evaluate(self, model: Any, examples: Any) -> dict[str, float]:
        """Nothing."""
        del model, examples
        return {"accuracy": 0.0, "loss": 0.0}


class SharedDigits(Digits):
    """The digits, of which every device has 64 at random, however many devices there are."""

    name = "shared-digits"

    def data(self, shard: anabranch.Shard) -> anabranch.Examples:
        """A draw of the whole training part."""
        if shard.role != "train":
            return super().data(shard)
        pool = super().data(anabranch.Shard("train"))
        rows = stream(0, "shared", shard.index).choice(len(pool), EXAMPLES, replace=False)
        return anabranch.Examples(pool.x[rows], pool.y[rows])


def settings(devices: int, updates: int, **fleet: Any) -> Config:
    """Everybody in training at a time; one virtual speed for each of eight groups of devices."""
    run = {"updates_max": updates, "evaluate_every_versions": 0, "keep_payloads": False}
    client = {"steps": STEPS, "batch_size": BATCH, "learning_rate": 0.05}
    tables = {"run": run, "fleet": {"clients": devices, **fleet}, "client": client}
    return merge([("benchmark", {**tables, "strategy": {"name": "fedbuff"}})])


def measure(name: str, app: anabranch.App, config: Config, workers: int = 0) -> Measured:
    """One simulation, from its first to its last event; what has to start is started before."""
    with open_simulation(config, app=app, workers=workers) as simulation:
        wall, cpu = time.perf_counter(), time.process_time()
        simulation.run()
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        applied = simulation.engine.counters.applied
    return Measured(name, config.fleet.clients, applied, wall_s, 0.0 if workers else cpu_s)


def no_training(devices: int) -> Measured:
    """The machinery alone, with a model of 100,000 parameters."""
    return measure("anabranch, no training", NoOp(), settings(devices, 4_000))


def client_app(devices: int) -> Measured:
    """A ClientApp as Flower has it, which sends back what it gets."""
    tables = {"run": {"workload": f"flower:{ECHO}"}}
    config = merge([("benchmark", settings(devices, 4_000).to_json()), ("benchmark", tables)])
    return measure("anabranch, Flower's ClientApp, no training", FlowerApp(ECHO), config)


def training(devices: int) -> Iterator[Measured]:
    """Digits, one by one and in stacks."""
    app, updates = SharedDigits(), 1_000 if devices <= 100 else 2 * devices
    measure("warm-up", app, settings(devices, devices, executor="batched"))
    yield measure("digits, serial", app, settings(devices, updates, executor="serial"))
    for stack in (1, 8, 64, 256):
        together = {"executor": "batched", "batch_devices": stack}
        yield measure(f"digits, batched, {stack} at a time", app, settings(devices, updates, **together))
    if installed("ray"):
        yield measure("digits, Ray, 2 workers", app, settings(devices, updates, executor="ray"), workers=2)


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


def flower(devices: int, rounds: int) -> Measured | None:
    """Flower's simulation in the same run; None where it does not come to an end."""
    command = [sys.executable, str(FLOWER), str(devices), str(rounds)]
    quiet = ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | dict.fromkeys(quiet, "0")
    environment["FLWR_DISABLE_UPDATE_CHECK"] = "1"
    with tempfile.TemporaryDirectory() as home:
        environment["FLWR_HOME"] = home
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=FLOWER_S_MAX, check=True, env=environment
            )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(f"Flower with {devices} devices: {error}")
            return None
    round_s = json.loads(next(t for t in done.stdout.splitlines() if t.startswith("{")))["round_s"]
    return Measured("Flower, no training", devices, devices * len(round_s), sum(round_s))


def section(devices_max: int = 1_000_000) -> str:
    """The figures as a section of docs/benchmarks.md."""
    blocks = [INTRODUCTION]
    blocks += [f"### {n} devices\n\n" + table(_rows(n)) for n in (100, 1_000)]
    if devices_max:
        blocks.append("### A large fleet, one in a hundred in training\n\n" + large_table(devices_max))
    return "\n\n".join(blocks) + "\n"


def _rows(devices: int) -> list[Measured]:
    rows = [no_training(devices)]
    if installed("flwr"):
        rows.append(client_app(devices))
    rows += training(devices)
    theirs = flower(devices, 5 if devices <= 100 else 2) if installed("flwr", "ray") else None
    return [*([theirs] if theirs is not None else []), *rows]


def table(rows: list[Measured]) -> str:
    """The figures; the ratio is to Flower where that was measured, and of the clock's time for both."""
    base = next((m for m in rows if m.name.startswith("Flower")), None)
    lines = ["| what | tasks | tasks a second | of processor time | times Flower |", "|---|---|---|---|---|"]
    for m in rows:
        wall = m.tasks / m.wall_s
        ratio = f"**{wall / (base.tasks / base.wall_s):.1f}**" if base is not None else "-"
        processor = f"{m.tasks / m.cpu_s:.0f}" if m.cpu_s else "-"
        lines.append(f"| {m.name} | {m.tasks} | {wall:.0f} | {processor} | {ratio} |")
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
images). Every device is in training at a time. Flower: its simulation engine (Ray, one CPU a client) with the
first of the two models; each client answers with what it was sent. Its first round, in which Ray starts, does
not count."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices-max", type=int, default=1_000_000, help="0: leave it out")
    arguments = parser.parse_args()
    print(section(arguments.devices_max))


if __name__ == "__main__":
    main()
