"""What the simulator reaches of a bare loop that does the same work with nothing round it.

    python -m benchmarks.simulator_ceilings [--rounds 5]

The loop and the simulation take turns in one process; rates are of processor time, of all threads, and
medians of the rounds. The loop copies what a device would copy, trains the same models on batches of the same
sizes, hashes, checks and adds up; it has no clock, no events, no leases, no log and no choice of batches.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import anabranch
from anabranch.core.config.tables import Config
from anabranch.core.model.params import add_scaled
from anabranch.simulation.problem import OneThread
from anabranch.simulation.run import open_simulation
from anabranch.workloads.digits import Digits
from anabranch.workloads.fashion_mnist import DEFAULT_PATH, FashionMnist
from benchmarks.fleet_speed import BATCH, PARAMETERS, STEPS, NoOp, settings, unnamed, wait_for

DEVICES = 100
BUFFER = 10  # updates in a version
STACK = 64
AHEAD = 32  # devices in a stack, a third of those in training: the next are begun before they are due
AHEAD_UPDATES = 500, 2_500
WORKERS = 0, 1, 2
LEARNING_RATE = 0.05
ROUNDS = 5


@dataclass(frozen=True)
class Compared:
    """Tasks a processor second, of the bare loop and of the simulation, as medians; and of their ratios."""

    name: str
    bare: float
    ours: float
    ratio: float


def bare_tasks(count: int, named: bool = True) -> None:
    """Tasks without training: a copy of the model, its delta, the payload, a check, the fold.

    `named`: with the payload's SHA-256.
    """
    model = np.zeros(PARAMETERS, np.float32)
    total = np.zeros_like(model)
    for number in range(count):
        own = model.copy()
        payload = np.subtract(own, model, out=own).tobytes()
        if named:
            hashlib.sha256(payload).hexdigest()
        delta = np.frombuffer(payload, np.float32)
        if not max(-float(delta.min()), float(delta.max())) < np.inf:
            raise ValueError("not finite")
        add_scaled(total, 1.0, delta)
        if number % BUFFER == BUFFER - 1:
            model += total / np.float32(BUFFER)
            total.fill(0.0)


def bare_digits(count: int) -> None:
    """Stacks of the net on the digits, forward, backward and step written out as batched products."""
    for _ in range(-(-count // STACK)):
        _bare_stack()


def _bare_stack() -> None:
    import torch

    shape = STACK, BATCH
    w1, w2 = torch.randn(STACK, 64, 64) * 0.1, torch.randn(STACK, 10, 64) * 0.1
    b1, b2 = torch.zeros(STACK, 1, 64), torch.zeros(STACK, 1, 10)
    pictures, labels = torch.rand(STEPS, *shape, 64), torch.randint(0, 10, (STEPS, *shape, 1))
    one = torch.full((*shape, 1), -1.0)
    for x, y in zip(pictures, labels, strict=True):
        hidden = torch.baddbmm(b1, x, w1.transpose(1, 2)).clamp_min_(0.0)
        g = torch.baddbmm(b2, hidden, w2.transpose(1, 2)).softmax(2).scatter_add_(2, y, one)
        back = torch.bmm(g, w2).mul_(hidden > 0)
        rate = -LEARNING_RATE / BATCH
        w2.baddbmm_(g.transpose(1, 2), hidden, alpha=rate)
        b2.add_(g.sum(1, keepdim=True), alpha=rate)
        w1.baddbmm_(back.transpose(1, 2), x, alpha=rate)
        b1.add_(back.sum(1, keepdim=True), alpha=rate)


def bare_pictures(count: int) -> None:
    """The CNN of `fashion-mnist`, one device after the other: nothing batched was faster on one core."""
    import torch

    net = FashionMnist().model()
    params = list(net.parameters())
    start = [p.detach().clone() for p in params]
    for _ in range(count):
        x, y = torch.rand(STEPS, BATCH, 1, 28, 28), torch.randint(0, 10, (STEPS, BATCH))
        with torch.no_grad():
            torch._foreach_copy_(params, start)
        for step in range(STEPS):
            loss = torch.nn.functional.cross_entropy(net(x[step]), y[step])
            gradients = torch.autograd.grad(loss, params)
            with torch.no_grad():
                torch._foreach_add_(params, gradients, alpha=-LEARNING_RATE)


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
    pairs = []
    for _ in range(1 + rounds):
        done, took_s = simulated(app, config)
        threads = OneThread()
        began_s = time.process_time()
        bare(tasks)
        pairs.append((tasks / (time.process_time() - began_s), done / took_s))
        threads.restore()
    del pairs[0]
    ratio = statistics.median(ours / bare_rate for bare_rate, ours in pairs)
    bare_rates, our_rates = zip(*pairs, strict=True)
    return Compared(name, statistics.median(bare_rates), statistics.median(our_rates), ratio)


@dataclass(frozen=True)
class Shared:
    """Milliseconds of processor time a task: of the simulating process, and of its worker processes."""

    workers: int
    own_ms: float
    workers_ms: float


def by_workers(rounds: int) -> list[Shared]:
    """Digits in stacks small enough to be begun ahead, with workers and without, in turns.

    Workers take seconds to start: they are measured by what a longer run takes more than a shorter one.
    """
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in WORKERS}
    for _ in range(rounds):
        for count, pairs in found.items():
            short, long = (_shared(count, updates) for updates in AHEAD_UPDATES)
            tasks = AHEAD_UPDATES[1] - AHEAD_UPDATES[0]
            pairs.append(((long[0] - short[0]) * 1e3 / tasks, (long[1] - short[1]) * 1e3 / tasks))
    return [
        Shared(count, *(statistics.median(column) for column in zip(*pairs, strict=True)))
        for count, pairs in found.items()
    ]


def _shared(workers: int, updates: int) -> tuple[float, float]:
    """Seconds of processor time of a run: of this process, and of all of its workers' lives."""
    before_s = _children_s()
    config = settings(DEVICES, updates, executor="batched", batch_devices=AHEAD)
    with open_simulation(config, app=Digits(), workers=workers) as simulation:
        wait_for(simulation, workers)
        began_s = time.process_time()
        simulation.run()
        own_s = time.process_time() - began_s
    return own_s, _children_s() - before_s


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_all(rounds: int = ROUNDS) -> list[Compared]:
    """Every kind of work."""
    no_training = f"no training, {PARAMETERS} parameters"
    stacks = settings(DEVICES, 2_000, executor="batched", batch_devices=STACK)
    tasks, without_names = settings(DEVICES, 2_000), partial(bare_tasks, named=False)
    rows = [
        compared(no_training, bare_tasks, NoOp(), tasks, rounds),
        compared(f"{no_training}, payload_digest none", without_names, NoOp(), unnamed(tasks), rounds),
        compared(f"digits, stacks of {STACK}", bare_digits, Digits(), stacks, rounds),
    ]
    if Path(DEFAULT_PATH).is_dir():
        for how in ("serial", "batched"):
            config = settings(DEVICES, 100, executor=how, batch_devices=16)
            name = f"CNN of Fashion-MNIST, {how}"
            rows.append(compared(name, bare_pictures, FashionMnist(), config, rounds))
    return rows


def section(rounds: int = ROUNDS) -> str:
    """The figures as a section of docs/benchmarks.md."""
    shared = workers_table(by_workers(rounds))
    return "\n\n".join([INTRODUCTION, table(run_all(rounds)), WITH_WORKERS, shared]) + "\n"


def table(rows: list[Compared]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| work | bare loop, tasks a processor second | anabranch | of the loop |",
        "|---|---|---|---|",
        *(f"| {row.name} | {row.bare:.0f} | {row.ours:.0f} | **{row.ratio:.2f}** |" for row in rows),
    ]
    return "\n".join(lines)


def workers_table(rows: list[Shared]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| workers | the simulating process, ms a task | the workers together, ms a task |",
        "|---|---|---|",
        *(f"| {row.workers} | {row.own_ms:.2f} | {row.workers_ms:.2f} |" for row in rows),
    ]
    return "\n".join(lines)


WITH_WORKERS = f"""With `--workers` stacks are trained in other processes, ahead of the virtual clock;
the digest is the same. Digits, {DEVICES} devices, stacks of {AHEAD}, medians of the rounds, in turns:"""

INTRODUCTION = f"""## Beside a bare loop

The same work by a loop with nothing round it, and by a simulation of {DEVICES} devices, in turns, in one
process: tasks a second of processor time, of all threads, medians of {ROUNDS} rounds. Without training the
loop copies, hashes (SHA-256; not in the second row), checks and adds up each update. With training
({STEPS} steps of {BATCH}) it draws its batches at random and trains, one thread: digits in stacks of {STACK}
by batched products, with the backward pass written out; the CNN one device after the other."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    print(section(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
