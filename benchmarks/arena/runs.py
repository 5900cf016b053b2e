"""One run of the arena, from its settings to a record."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from anabranch.core.config.tables import Config
from anabranch.core.model.params import Vector
from anabranch.reports.fairness import worst_tenth
from anabranch.reports.result import Point as Measured
from anabranch.reports.result import Result
from anabranch.simulation.problem import Problem, ProblemSource
from anabranch.simulation.run import open_simulation
from anabranch.workloads.app import Examples
from benchmarks.arena.store import Record
from benchmarks.arena.tuning import TEST, Run
from benchmarks.studies import late_accuracy


def record_of(row: str, run: Run, names: Sequence[str], config: Config) -> Record:
    """Run it."""
    try:
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
            round(late_accuracy(result), 3),
            round(half_accuracy(result.history, config.run.virtual_s_max), 3),
            round(worst_tenth_of_devices(config, vector), 3) if final else None,
            result.updates_applied,
            result.versions,
            round(result.staleness.mean, 3),
            round(result.uplink_bytes / 1e6, 4),
            round(result.downlink_bytes / 1e6, 4),
            result.model_sha256,
            curve_of(result) if final else [],
        )
    finally:
        gc.collect()  # a run is a circle of objects, and holds every device's examples


def curve_of(result: Result) -> list[list[float]]:
    """What is drawn of a run, and asked for what it took to a target."""
    return [
        [
            round(p.time_s, 2),
            round(100 * (p.accuracy or 0.0), 3),
            round(p.uplink_bytes / 1e6, 4),
            round(p.downlink_bytes / 1e6, 4),
        ]
        for p in result.history
    ]


def half_accuracy(history: Sequence[Measured], horizon_s: float) -> float:
    """Mean accuracy, in %, from 0.4 to half of the time: a late one, had the run ended there."""
    found = [100 * (p.accuracy or 0.0) for p in history if 0.4 * horizon_s <= p.time_s <= 0.5 * horizon_s]
    return statistics.fmean(found) if found else 0.0


def worst_tenth_of_devices(config: Config, vector: Vector) -> float:
    """Mean accuracy, in %, over the worst tenth of the devices, each on the test examples of its own classes.

    A device's is the mean of the classes' accuracies, as often as its training examples are of each.
    """
    problem = ProblemSource(config).open()
    by_class = _by_class(problem, vector)
    labels = (problem.examples(i).y for i in range(config.fleet.clients))
    return 100 * worst_tenth([device_accuracy(y.tolist(), by_class) for y in labels], "max")


def device_accuracy(labels: Sequence[int], by_class: Mapping[int, float]) -> float:
    """Of a device that has examples with these labels."""
    return statistics.fmean(by_class[label] for label in labels)


def _by_class(problem: Problem, vector: Vector) -> dict[int, float]:
    held_out = problem.app.data(problem.shard(TEST))
    found = {}
    for label in np.unique(held_out.y).tolist():
        rows = np.flatnonzero(held_out.y == label)
        part = Examples(held_out.x[rows], held_out.y[rows])
        found[label] = problem.trainer.evaluate(vector, problem.frozen, part, 0)["accuracy"]
    return found
