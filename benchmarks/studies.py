"""The machinery of a study: points of a grid, runs in processes, equal tuning budgets, paired seeds."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from anabranch.core.config import Config, merge
from anabranch.reports.result import Result

Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Point:
    """One method at one point of its grid: `layers` of configuration tables, later ones over earlier."""

    method: str
    layers: tuple[Tables, ...]
    chosen: Mapping[str, float]

    def config(self, seed: int, part: str) -> Config:
        """The run of this point on a seed, measured on `part`."""
        named = [(f"layer {i}", layer) for i, layer in enumerate(self.layers)]
        return merge([*named, ("seed", {"run": {"seed": seed, "evaluate_on": part}})])


@dataclass(frozen=True)
class Tuned:
    """The best point of a method, and the score (mean seconds to the target, lower is better) of each."""

    best: Point
    scores: tuple[tuple[Point, float], ...]


Job = tuple[Point, int, str]


def run(job: Job) -> Result:
    """One simulation, in a worker process. A tuning run (on validation) ends once it is at the target."""
    from anabranch.simulation.run import Progress, open_simulation

    point, seed, part = job
    config, started = point.config(seed, part), time.perf_counter()

    def tell(progress: Progress) -> None:
        if part == "validation" and progress.accuracy >= config.run.target_accuracy:
            simulation.clock.stop()

    with open_simulation(config, progress=tell) as simulation:
        simulation.run()
        return simulation.result(time.perf_counter() - started)


def one_thread() -> None:
    """Workers take one core each: to be called before any of them starts."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")


def seconds_to_target(results: Sequence[Result], horizon_s: float) -> float:
    """Mean over seeds; a run that never got there counts twice the horizon, less what it came near."""
    return statistics.fmean(
        2 * horizon_s - (r.best_accuracy or 0.0) if r.time_to_target_s is None else r.time_to_target_s
        for r in results
    )


def tune(pool: ProcessPoolExecutor, points: Sequence[Point], seeds: Sequence[int], horizon_s: float) -> Tuned:
    """Run every point on the tuning seeds."""
    results = list(pool.map(run, [(p, s, "validation") for p in points for s in seeds]))
    width = len(seeds)
    scores = tuple(
        (p, seconds_to_target(results[i * width : (i + 1) * width], horizon_s)) for i, p in enumerate(points)
    )
    best = min(scores, key=lambda pair: pair[1])
    print(f"tuned {best[0].method}: {dict(best[0].chosen)}, {best[1]:.1f} s", flush=True)
    return Tuned(best[0], scores)


def compare(pool: ProcessPoolExecutor, point: Point, seeds: Sequence[int]) -> list[Result]:
    """Run a tuned point on the paired seeds, measured on the test part."""
    results = list(pool.map(run, [(point, s, "test") for s in seeds]))
    print(f"ran {point.method}: {[r.time_to_target_s for r in results]}", flush=True)
    return results


def mean(values: Iterable[float], digits: int = 1) -> str:
    """Mean and sample standard deviation."""
    values = list(values)
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [list(head), ["---"] * len(head), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
