"""What does differential privacy cost, and does correlated noise pay? Equally tuned, on paired fresh seeds.

    python -m benchmarks.study_privacy [--quick | --render]

140 devices of ten digits each; every method has the same ladder of two numbers, tuned by the same rule on
seeds that the comparison does not use. Writes `docs/studies/privacy.md` and `.json`; `--quick` the same of
fewer points and seeds, into /tmp.

| symbol | meaning                                                                           |
|--------|-----------------------------------------------------------------------------------|
| C      | the clip: 0.5 x 2^i. Without privacy in its place the devices' rate, 0.3 x 2^i    |
| eta    | the server's rate, 2^j                                                            |
| m      | bands: 1 is independent noise, b (the separation) the most that can be correlated |
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.reports.intervals import mean_interval
from benchmarks.studies import (
    STUDIES,
    Point,
    Tables,
    late_accuracy,
    mean,
    pool_of,
    publish,
    run,
    study_parser,
    table,
)

COMMAND = "python -m benchmarks.study_privacy"
TUNING_SEEDS, SEEDS = (101, 102), (1, 2, 3, 4, 5)
EPSILONS = (1.0, 2.0, 8.0)
VERSIONS, PARTICIPATIONS, SEPARATION = 40, 10, 4  # every device gives all that it may
BANDS = {"independent": 1, "correlated": SEPARATION}
EXTENSIONS_MAX = 6  # rows and columns that a grid gets beside its first nine points

WORKLOADS = {"nothing": "digits", "rotated": f"{Path(__file__).parent / 'rotated_digits.py'}:RotatedDigits"}
STARTS = {"nothing": "from nothing", "rotated": "trained on rotated digits before"}

BASE: Tables = {
    "run": {
        "name": "study-privacy",
        "versions_max": VERSIONS,
        "evaluate_every_versions": 2,
        "keep_payloads": False,
    },
    "fleet": {"clients": 140},
    "client": {"steps": 10, "batch_size": 10},
}

Place = tuple[int, int]  # i and j


@dataclass(frozen=True)
class Method:
    """What is compared: noise of a kind, at an epsilon; none at 0. `start`: of `WORKLOADS`."""

    epsilon: float
    noise: str
    start: str = "nothing"

    @property
    def name(self) -> str:
        """As the tables say it."""
        private = f"ε {self.epsilon:g}, {self.noise}" if self.epsilon else "no privacy"
        return private if self.start == "nothing" else f"{private}; {self.start}"

    def said(self, place: Place) -> str:
        """The two numbers of a place."""
        first = f"clip {0.5 * 2.0 ** place[0]:g}" if self.epsilon else f"devices {0.3 * 2.0 ** place[0]:g}"
        return f"{first}, server {2.0 ** place[1]:g}"

    def point(self, place: Place) -> Point:
        """The run there."""
        i, j = place
        here: dict[str, Any] = {
            "run": {"workload": WORKLOADS[self.start]},
            "client": {"learning_rate": 0.3 if self.epsilon else 0.3 * 2.0**i},
            "strategy": {"name": "fedbuff", "buffer_size": 35, "outer": {"name": "sgd", "lr": 2.0**j}},
        }
        if self.epsilon:
            here["privacy"] = {
                "clip": 0.5 * 2.0**i,
                "epsilon": self.epsilon,
                "participations": PARTICIPATIONS,
                "separation": SEPARATION,
                "bands": BANDS[self.noise],
            }
        return Point(self.name, (BASE, here), {})


METHODS = tuple(
    Method(epsilon, noise, start)
    for start in WORKLOADS
    for epsilon, noise in [*itertools.product(EPSILONS, BANDS), (0.0, "")]
)
FIRST: tuple[Place, ...] = tuple((i, j) for i in (-1, 0, 1) for j in (-1, 0, 1))


def reached(job: tuple[Method, Place, int, str]) -> tuple[float, float]:
    """In a worker: accuracy in % over the last fifth of a run, and seconds of the processor."""
    method, place, seed, part = job
    began = time.process_time()
    result = run((method.point(place), seed, part, 1))
    return late_accuracy(result), time.process_time() - began


class Search:
    """The grid of one method: nine places, and a row more as long as the best is on an edge."""

    def __init__(self, first: Sequence[Place]) -> None:
        self.scores: dict[Place, float] = {}
        self.wanted = list(first)
        self.extensions = 0

    @property
    def best(self) -> Place:
        """Of those that were tried."""
        return max(self.scores, key=lambda place: self.scores[place])

    def edges(self) -> list[tuple[int, int]]:
        """Where the best has no neighbour: pairs of an axis and a direction."""
        places = self.scores
        return [
            (axis, way)
            for axis in (0, 1)
            for way in (-1, 1)
            if self.best[axis] == way * max(way * place[axis] for place in places)
        ]

    def extend(self) -> None:
        """Want what lies beyond the edges that the best is on."""
        self.wanted = []
        for axis, way in self.edges():
            if self.extensions == EXTENSIONS_MAX:
                return
            self.extensions += 1
            across = sorted({place[1 - axis] for place in (*self.scores, *self.wanted)})
            at = self.best[axis] + way
            row = [(at, other) if axis == 0 else (other, at) for other in across]
            self.wanted += [place for place in row if place not in self.wanted]


def tuned(pool: Executor, quick: bool) -> tuple[dict[str, Search], float]:
    """The search of each method, and seconds of the processor."""
    seeds = TUNING_SEEDS[:1] if quick else TUNING_SEEDS
    searches = {method: Search(FIRST[::4] if quick else FIRST) for method in METHODS}
    spent = 0.0
    while tasks := [(m, place) for m, search in searches.items() for place in search.wanted]:
        jobs = [(m, place, seed, "validation") for m, place in tasks for seed in seeds]
        found = list(pool.map(reached, jobs))
        spent += sum(seconds for _, seconds in found)
        for n, (method, place) in enumerate(tasks):
            here = found[n * len(seeds) : (n + 1) * len(seeds)]
            searches[method].scores[place] = statistics.fmean(accuracy for accuracy, _ in here)
        for method, search in searches.items():
            search.wanted = []
            if not quick:
                search.extend()
            print(method.name, method.said(search.best), f"{search.scores[search.best]:.1f}", flush=True)
    return {method.name: search for method, search in searches.items()}, spent


def measured(quick: bool) -> dict[str, Any]:
    """All that the page says, as JSON."""
    began, seeds = time.monotonic(), SEEDS[:2] if quick else SEEDS
    with pool_of() as pool:
        searches, spent = tuned(pool, quick)
        jobs = [(m, searches[m.name].best, seed, "test") for m in METHODS for seed in seeds]
        found = list(pool.map(reached, jobs))
    methods = {}
    for n, method in enumerate(METHODS):
        search, here = searches[method.name], found[n * len(seeds) : (n + 1) * len(seeds)]
        methods[method.name] = {
            "epsilon": method.epsilon,
            "noise": method.noise,
            "start": method.start,
            "tuned": {method.said(place): score for place, score in search.scores.items()},
            "best": method.said(search.best),
            "on_an_edge": bool(search.edges()),
            "accuracy": [accuracy for accuracy, _ in here],
        }
    return {
        "minutes": (time.monotonic() - began) / 60,
        "processor_minutes": (spent + sum(seconds for _, seconds in found)) / 60,
        "cores": os.cpu_count(),
        "seeds": seeds,
        "methods": methods,
    }


# --- the page ------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> str:
    """The mean and the 95 % interval of it."""
    found = mean_interval(values)
    return f"{statistics.fmean(values):.1f}" + (f" ({found[0]:.1f} to {found[1]:.1f})" if found else "")


def less(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Seed by seed."""
    return [a - b for a, b in zip(values, others, strict=True)]


def rows_of_methods(methods: Mapping[str, Any]) -> Iterator[list[str]]:
    """The lowest accuracy first."""
    start = next(iter(methods.values()))["start"]
    plain = methods[Method(0.0, "", start).name]["accuracy"]
    for name in sorted(methods, key=lambda name: statistics.fmean(methods[name]["accuracy"])):
        of = methods[name]
        apart = interval(less(of["accuracy"], plain)) if of["epsilon"] else ""
        edge = " (on an edge)" if of["on_an_edge"] else ""
        yield [name, mean(of["accuracy"]), interval(of["accuracy"]), apart, of["best"] + edge]


def rows_of_noise(methods: Mapping[str, Any]) -> Iterator[list[str]]:
    """Correlated noise less independent, at each epsilon."""
    for start, epsilon in itertools.product(WORKLOADS, EPSILONS):
        kinds = [methods[Method(epsilon, noise, start).name]["accuracy"] for noise in BANDS]
        apart = less(kinds[1], kinds[0])
        each = ", ".join(f"{value:+.1f}" for value in apart)
        yield [STARTS[start], f"{epsilon:g}", interval(apart), each]


def tables_of_methods(methods: Mapping[str, Any]) -> Iterator[str]:
    """One for each start."""
    head = "method", "accuracy, %", "mean and its 95 % interval", "less no privacy", "tuned to"
    for start, said in STARTS.items():
        those = {name: of for name, of in methods.items() if of["start"] == start}
        yield f"### {said.capitalize()}\n\n{table(head, rows_of_methods(those))}"


def rows_of_tuning(methods: Mapping[str, Any]) -> Iterator[list[str]]:
    """Every point that was tried."""
    for name, of in methods.items():
        for said, score in of["tuned"].items():
            yield [name, said, f"{score:.1f}", "**yes**" if said == of["best"] else ""]


def page(data: Mapping[str, Any], quick: bool) -> str:
    """In Markdown."""
    methods, form = data["methods"], ""
    if quick:
        form = "\n**The quick form: few points, few seeds; a first look, and no proof.**\n"
    command = f"{COMMAND}{' --quick' if quick else ''}"
    took = (
        f"{data['minutes']:.0f} minutes on {data['cores']} cores, {data['processor_minutes']:.0f} of one core"
    )
    seeds = ", ".join(str(seed) for seed in data["seeds"])
    compared = "\n\n".join(tables_of_methods(methods))
    return f"""# Study: what differential privacy costs, and whether correlated noise pays

Made by `{command}`; do not edit. {took}.
{form}
140 simulated devices of about ten digits each learn a perceptron of 4,810 parameters, from nothing, and from
one that was trained before on pictures turned by a quarter, a half and three quarters
(`benchmarks/rotated_digits.py`: they are the same pictures, so nothing is promised about them there; it
stands for a start on data of other people; it knows four in ten of the upright ones).
FedBuff, buffers of 35, {VERSIONS} versions, each device {PARTICIPATIONS} times at most and {SEPARATION}
versions apart, δ = 10⁻⁶ for each device. Correlated noise is of {SEPARATION} bands, as many as the
separation allows; independent noise is of one. Accuracy is the mean of a run's last fifth. Paired seeds
{seeds} give data, model and devices' speeds; the noise is of the operating system, as it has to be, so this
study comes out a little different each time.

What did worst is first; mean ± standard deviation of the seeds, differences seed by seed.

{compared}

## Correlated less independent noise

{table(("start", "ε", "points, mean and its 95 % interval", "seed by seed"), rows_of_noise(methods))}

## Tuning

The same for all: nine points in steps of two, on the validation part of seeds that are not compared; as long
as the best is on an edge a row beyond it, {EXTENSIONS_MAX} rows at most.

{table(("method", "point", "accuracy, %", "chosen"), rows_of_tuning(methods))}
"""


def main() -> None:
    """Run the study."""
    parser = study_parser(__doc__, "fewer points and seeds; into /tmp")
    arguments = parser.parse_args()
    folder = Path("/tmp") if arguments.quick else STUDIES
    kept = folder / "privacy.json"
    if not arguments.render:
        kept.write_text(json.dumps(measured(arguments.quick), indent=1) + "\n", encoding="utf-8")
    data = json.loads(kept.read_text(encoding="utf-8"))
    publish(folder / "privacy.md", page(data, arguments.quick), __file__)


if __name__ == "__main__":
    main()
