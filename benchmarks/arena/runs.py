"""One run of the arena, from its settings to a record."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from anabranch.core.config.tables import Config
from anabranch.core.model.chains import AUTO
from anabranch.core.model.metrics import ACCURACY
from anabranch.core.model.params import Vector
from anabranch.reports.fairness import worst_tenth
from anabranch.reports.result import Point as Measured
from anabranch.simulation.executors.names import BATCHED, COMPILED
from anabranch.simulation.problem import Problem, ProblemSource
from anabranch.simulation.run import open_simulation
from anabranch.workloads.app import Examples
from anabranch.workloads.splits import Labels
from benchmarks.arena.pools import PoolApp
from benchmarks.arena.store import Record
from benchmarks.arena.tuning import TEST, Run


def record_of(row: str, run: Run, names: Sequence[str], config: Config) -> Record:
    """Run it."""
    try:
        return _recorded(row, run, names, config)
    finally:  # outside the frame that has the run: what is frozen while it is held is never let go
        gc.collect()  # a run is a circle of objects, and holds every device's examples
        gc.freeze()  # what is left is the process's own: looked at again, it cost a third of a short run


def _recorded(row: str, run: Run, names: Sequence[str], config: Config) -> Record:
    with open_simulation(config) as simulation:
        simulation.run()
        result, vector = simulation.result(0.0), simulation.engine.vector
    final = run.part == TEST
    return Record(
        row,
        dict(zip(names, run.setting, strict=True)),
        run.share,
        run.seed,
        run.part,
        "",
        round(late_score(result.history, config.run.metric), 3),
        round(half_score(result.history, config.run.virtual_s_max, config.run.metric), 3),
        round(worst_tenth_of_devices(config, vector), 3) if final else None,
        result.updates_applied,
        result.versions,
        round(result.staleness.mean, 3),
        round(result.uplink_bytes / 1e6, 4),
        round(result.downlink_bytes / 1e6, 4),
        result.model_sha256,
        curve_of(result.history, config.run.metric) if final else [],
    )


def record_on_gpu(row: str, run: Run, names: Sequence[str], config: Config) -> Record:
    """The same on a CUDA GPU, in float32 and in stacks. Raises `ConfigError` where there is none.

    Convolutions are then in TF32, as PyTorch has it unless told otherwise.
    """
    client = replace(config.client, device="cuda", precision="float32")
    fleet = replace(config.fleet, executor=BATCHED)
    return record_of(row, run, names, replace(config, client=client, fleet=fleet))


def record_compiled(row: str, run: Run, names: Sequence[str], config: Config) -> Record:
    """The same on a processor by programs that torch compiles, where a model's passes are not written out."""
    return record_of(row, run, names, replace(config, fleet=replace(config.fleet, executor=COMPILED)))


def score_of(point: Measured, metric: str) -> float:
    """Accuracy, or what else the run is judged by, in %. A model that has diverged has none: 0."""
    return 100 * (point.measured.get(ACCURACY if metric == AUTO else metric) or 0.0)


def curve_of(history: Sequence[Measured], metric: str = AUTO) -> list[list[float]]:
    """What is drawn of a run, and asked for what it took to a target."""
    return [
        [
            round(p.time_s, 2),
            round(score_of(p, metric), 3),
            round(p.uplink_bytes / 1e6, 4),
            round(p.downlink_bytes / 1e6, 4),
        ]
        for p in history
    ]


def late_score(history: Sequence[Measured], metric: str = AUTO) -> float:
    """Mean over the last fifth of a run: the end, without the noise of one moment."""
    return _between(history, 0.8 * history[-1].time_s, history[-1].time_s, metric)


def half_score(history: Sequence[Measured], horizon_s: float, metric: str = AUTO) -> float:
    """Mean from 0.4 to half of the time: a late one, had the run ended there."""
    return _between(history, 0.4 * horizon_s, 0.5 * horizon_s, metric)


def _between(history: Sequence[Measured], first_s: float, last_s: float, metric: str) -> float:
    found = [score_of(p, metric) for p in history if first_s <= p.time_s <= last_s]
    return statistics.fmean(found) if found else 0.0


def worst_tenth_of_devices(config: Config, vector: Vector) -> float:
    """Mean score, in %, over the worst tenth of the devices, each on the test examples of its own classes.

    A device's is the mean of the classes' scores, as often as its training examples are of each.
    """
    problem = ProblemSource(config).open()
    by_class = _by_class(problem, vector)
    devices = (_classes(problem, "train", i) for i in range(config.fleet.clients))
    return 100 * worst_tenth([device_accuracy(labels.tolist(), by_class) for labels in devices], "max")


def device_accuracy(labels: Sequence[int], by_class: Mapping[int, float]) -> float:
    """Of a device that has examples with these labels."""
    return statistics.fmean(by_class[label] for label in labels)


def _by_class(problem: Problem, vector: Vector) -> dict[int, float]:
    held_out, labels = problem.app.data(problem.shard(TEST)), _classes(problem, TEST)
    metric = problem.config.run.metric
    found = {}
    for label in np.unique(labels).tolist():
        rows = np.flatnonzero(labels == label)
        part = Examples(held_out.x[rows], held_out.y[rows])
        measured = problem.trainer.evaluate(vector, problem.frozen, part, 0)
        found[label] = measured[ACCURACY if metric == AUTO else metric]
    return found


def _classes(problem: Problem, role: str, device: int = 0) -> Labels:
    """What devices differ in, of each example of a shard: its kind where an App has kinds, else its label."""
    shard = problem.shard(role, device)
    if isinstance(problem.app, PoolApp):
        return problem.app.kinds(shard)
    labels: Labels = problem.app.data(shard).y
    return labels
