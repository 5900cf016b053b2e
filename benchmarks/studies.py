"""The machinery of a study: points of a grid, runs in processes, equal tuning budgets, paired seeds."""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.core.config.tables import Config, merge
from anabranch.reports.result import Point as Measured
from anabranch.reports.result import Result

STUDIES = Path(__file__).parents[1] / "docs" / "studies"
Tables = Mapping[str, Mapping[str, Any]]
# Its strategy, its tables, the strategy's parameters, and the values of the one that matters most.
Method = tuple[str, Tables, Mapping[str, Any], Mapping[str, Sequence[float]]]
Scores = Sequence[tuple[Mapping[str, float], float, bool]]  # chosen values, seconds, whether it is the best
Finals = Mapping[str, Sequence[Result]]


@dataclass(frozen=True)
class Point:
    """One method at one point of its grid: `layers` of configuration tables, later ones over earlier."""

    method: str
    layers: tuple[Tables, ...]
    chosen: Mapping[str, float]

    def config(self, seed: int, part: str) -> Config:
        """The run of this point on a seed, measured on `part`."""
        return merge([(f"layer {i}", layer) for i, layer in enumerate(self.whole(seed, part))])

    def whole(self, seed: int, part: str) -> tuple[Tables, ...]:
        """The layers of that run."""
        return *self.layers, {"run": {"seed": seed, "evaluate_on": part}}


@dataclass(frozen=True)
class Tuned:
    """The best point of a method, and the score (mean seconds to the target, lower is better) of each."""

    best: Point
    scores: tuple[tuple[Point, float], ...]

    def plain(self) -> Scores:
        """As JSON."""
        return [(dict(point.chosen), score, point == self.best) for point, score in self.scores]


def grid(name: str, method: Method, base: Sequence[Tables], rates: Sequence[float]) -> list[Point]:
    """The points of a method: every learning rate with every value of what matters most to it."""
    strategy, tables, params, choices = method
    ((key, values),) = choices.items()
    return [
        Point(
            name,
            (
                *base,
                tables,
                {"client": {"learning_rate": rate}, "strategy": {"name": strategy, **params, key: value}},
            ),
            {"learning_rate": rate, key: value},
        )
        for rate, value in itertools.product(rates, values)
    ]


def chosen_of(points: Sequence[Point], scores: Scores) -> Point:
    """The one that tuning has chosen, of the points of the grid."""
    (chosen,) = (values for values, _, best in scores if best)
    (point,) = (p for p in points if p.chosen == chosen)
    return point


# A point, a seed, the part it is measured on, and how many evaluations in a row must be at the target.
Job = tuple[Point, int, str, int]


def run(job: Job) -> Result:
    """One simulation, in a worker process. A tuning run (on validation) ends once it is at the target."""
    try:
        return _simulated(job)
    finally:
        gc.collect()  # a run holds every device's examples, and is a circle of objects


def _simulated(job: Job) -> Result:
    from anabranch.simulation.run import RunProgress, open_simulation

    point, seed, part, in_a_row = job
    config, started = point.config(seed, part), time.perf_counter()
    newest: deque[float] = deque(maxlen=in_a_row)

    def tell(progress: RunProgress) -> None:
        if not progress.evaluated or progress.accuracy is None:
            return
        newest.append(progress.accuracy)
        target = config.run.target_accuracy  # 0: none, and all of the run counts
        there = len(newest) == in_a_row and statistics.fmean(newest) >= target > 0
        if part == "validation" and there:
            simulation.clock.stop()

    with open_simulation(config, progress=tell) as simulation:
        simulation.run()
        return simulation.result(time.perf_counter() - started)


def one_thread() -> None:
    """Workers take one core each: to be called before any of them starts."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")


def pool_of(start: str = "spawn", workers: int | None = None) -> ProcessPoolExecutor:
    """A worker process for each core, or so many."""
    one_thread()
    return ProcessPoolExecutor(workers or os.cpu_count(), mp_context=multiprocessing.get_context(start))


def reached(history: Sequence[Measured], target: float, in_a_row: int = 1) -> Measured | None:
    """The first evaluation at which the mean accuracy of the last `in_a_row` is at the target."""
    for i in range(in_a_row, len(history) + 1):
        if statistics.fmean(p.accuracy or 0.0 for p in history[i - in_a_row : i]) >= target:
            return history[i - 1]
    return None


def seconds_to_target(results: Sequence[Result], horizon_s: float, in_a_row: int = 1) -> float:
    """Mean over seeds; a run that never got there counts twice the horizon, less what it came near."""
    found = [(r, reached(r.history, r.target_accuracy, in_a_row)) for r in results]
    return statistics.fmean(
        2 * horizon_s - (r.best_accuracy or 0.0) if at is None else at.time_s for r, at in found
    )


def tune(
    pool: ProcessPoolExecutor,
    points: Sequence[Point],
    seeds: Sequence[int],
    horizon_s: float,
    in_a_row: int = 1,
) -> Tuned:
    """Run every point on the tuning seeds."""
    results = list(pool.map(run, [(p, s, "validation", in_a_row) for p in points for s in seeds]))
    width = len(seeds)
    scores = tuple(
        (p, seconds_to_target(results[i * width : (i + 1) * width], horizon_s, in_a_row))
        for i, p in enumerate(points)
    )
    best = min(scores, key=lambda pair: pair[1])
    print(f"tuned {best[0].method}: {dict(best[0].chosen)}, {best[1]:.1f} s", flush=True)
    return Tuned(best[0], scores)


def compare(pool: ProcessPoolExecutor, point: Point, seeds: Sequence[int]) -> list[Result]:
    """Run a tuned point on the paired seeds, measured on the test part."""
    results = list(pool.map(run, [(point, s, "test", 1) for s in seeds]))
    print(f"ran {point.method}: {[r.time_to_target_s for r in results]}", flush=True)
    return results


def plain(results: Sequence[Result]) -> list[dict[str, Any]]:
    """As JSON, without what would be most of the file: what each device gave, the configuration, coverage."""
    return [{**r.to_json(), "clients": {}, "config": {}, "coverage": ()} for r in results]


def late_accuracy(result: Result) -> float:
    """Mean accuracy, in %, over the last fifth of the run: the end, without the noise of one moment."""
    end_s = result.history[-1].time_s
    return statistics.fmean(100 * (p.accuracy or 0.0) for p in result.history if p.time_s >= 0.8 * end_s)


def tuning_rows(
    tuned: Mapping[str, Scores],
) -> Iterator[list[str]]:
    """A row for each point of each method: its values, its score, and whether it was chosen."""
    for method, scores in tuned.items():
        for chosen, score, best in scores:
            values = ", ".join(f"{k} = {v:g}" for k, v in chosen.items())
            yield [method, values, f"{score:.0f}", "**yes**" if best else ""]


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


def study_parser(description: str | None, quick: str) -> argparse.ArgumentParser:
    """What the commands of studies have in common; `quick` says what `--quick` leaves out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--render", action="store_true", help="write the page again of what was measured")
    return parser


def publish(page: Path, text: str, study: str) -> None:
    """Write a page and print it, with what was found by looking: the remarks beside the study's own file."""
    remarks = Path(study).with_suffix(".remarks.md")
    if remarks.exists():
        text += "\n" + remarks.read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    print(text)
