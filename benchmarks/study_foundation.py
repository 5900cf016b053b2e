"""Do asynchronous strategies reach a target sooner than rounds? 100 unequal devices, Fashion-MNIST.

    python -m benchmarks.study_foundation [--quick]

Each strategy gets the same tuning budget: a grid of eight points, judged by the time to the target on
the validation part, on seeds that the comparison does not use. The tuned strategies then run on the
paired seeds and are measured on the test part. Writes `docs/studies/foundation.md`, `.svg` and `.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from anabranch.core.config.tables import Config, merge
from anabranch.reports.compare import comparison_svg
from anabranch.reports.result import Result
from benchmarks.studies import publish

STUDIES = Path(__file__).parents[1] / "docs" / "studies"
NAME = "foundation"

TARGET = 0.80
HORIZON_S = 400.0
TUNING_SEEDS = (101, 102)
SEEDS = (1, 2, 3, 4, 5)
CONCURRENCY = 20

BASE: dict[str, dict[str, Any]] = {
    "run": {
        "name": f"study-{NAME}",
        "workload": "fashion-mnist",
        "target_accuracy": TARGET,
        "virtual_s_max": HORIZON_S,
        "evaluate_every_s": 4.0,
        "evaluate_every_versions": 0,
        "keep_payloads": False,
    },
    "fleet": {
        "clients": 100,
        "split": "dirichlet",
        "dirichlet_alpha": 0.3,
        "examples_per_client": 200,
        "speed": "levels",
        "speed_ratio": 5.0,
        "speed_levels": 8,
        "step_time_s": 0.1,
    },
    "client": {"batch_size": 20, "epochs": 2},
}

LEARNING_RATES = (0.05, 0.1, 0.2, 0.4)
# Two values of the parameter that matters most to each; what is not in the grid keeps its default.
# At most CONCURRENCY devices train at a time under every strategy.
ROUNDS = {"clients_per_round": 16, "over_selection": CONCURRENCY / 16, "deadline_s": 60.0}
GRIDS: dict[str, list[dict[str, Any]]] = {
    "fedavg": [{**ROUNDS, "clients_per_round": m} for m in (8, 16)],
    "fedprox": [{**ROUNDS, "mu": mu} for mu in (0.01, 0.1)],
    "fedasync": [{"alpha": alpha} for alpha in (0.3, 0.6)],
    "fedbuff": [{"buffer_size": k} for k in (5, 10)],
}
SYNCHRONOUS = ("fedavg", "fedprox")


@dataclass(frozen=True)
class Point:
    """One point of a grid."""

    strategy: str
    learning_rate: float
    params: dict[str, Any]

    def config(self, seed: int, part: str) -> Config:
        """The run of this point on a seed, measured on `part`."""
        server = {"concurrency": 0 if self.strategy in SYNCHRONOUS else CONCURRENCY}
        return merge(
            [
                ("base", BASE),
                ("seed", {"run": {"seed": seed, "evaluate_on": part}, "server": server}),
                ("client", {"client": {"learning_rate": self.learning_rate}}),
                ("point", {"strategy": {"name": self.strategy, **self.params}}),
            ]
        )


def grid(strategy: str) -> list[Point]:
    """The eight points of a strategy."""
    return [Point(strategy, lr, p) for lr, p in itertools.product(LEARNING_RATES, GRIDS[strategy])]


def run(job: tuple[Point, int, str]) -> Result:
    """One simulation, in a worker process. A tuning run ends once it has reached the target."""
    from anabranch.simulation.run import RunProgress, open_simulation

    point, seed, part = job
    started = time.perf_counter()

    def tell(progress: RunProgress) -> None:
        if part == "validation" and (progress.accuracy or 0.0) >= TARGET:
            simulation.clock.stop()

    with open_simulation(point.config(seed, part), progress=tell) as simulation:
        simulation.run()
        return simulation.result(time.perf_counter() - started)


def seconds_to_target(results: Sequence[Result]) -> float:
    """Mean over seeds; a run that never got there counts twice the horizon."""
    times = [2 * HORIZON_S if r.time_to_target_s is None else r.time_to_target_s for r in results]
    return statistics.fmean(times)


def main() -> None:
    """Tune, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one seed each, a short horizon, nothing written"
    )
    quick = parser.parse_args().quick
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    started = time.monotonic()
    tuning_seeds, seeds = (TUNING_SEEDS[:1], SEEDS[:1]) if quick else (TUNING_SEEDS, SEEDS)
    if quick:
        BASE["run"]["virtual_s_max"] = 40.0
    context = multiprocessing.get_context("fork" if quick else "spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        tuned = {s: _tune(pool, s, tuning_seeds) for s in GRIDS}
        finals = {s: _compare(pool, point, seeds) for s, (point, _) in tuned.items()}
    minutes = (time.monotonic() - started) / 60
    text = _document(tuned, finals, minutes)
    if quick:
        print(text)
    else:
        _write(text, tuned, finals)


Tuned = dict[str, tuple[Point, list[tuple[Point, float]]]]
Finals = dict[str, list[Result]]


def _tune(
    pool: ProcessPoolExecutor, strategy: str, seeds: Sequence[int]
) -> tuple[Point, list[tuple[Point, float]]]:
    points = grid(strategy)
    jobs = [(p, s, "validation") for p in points for s in seeds]
    results = list(pool.map(run, jobs))
    scores = [
        (p, seconds_to_target(results[i * len(seeds) : (i + 1) * len(seeds)])) for i, p in enumerate(points)
    ]
    best = min(scores, key=lambda pair: pair[1])
    print(
        f"tuned {strategy}: learning rate {best[0].learning_rate}, {best[0].params}, {best[1]:.1f} s",
        flush=True,
    )
    return best[0], scores


def _compare(pool: ProcessPoolExecutor, point: Point, seeds: Sequence[int]) -> list[Result]:
    results = list(pool.map(run, [(point, s, "test", 1) for s in seeds]))
    print(f"ran {point.strategy}: {[r.time_to_target_s for r in results]}", flush=True)
    return results


def _mean(values: Sequence[float], digits: int = 1) -> str:
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def _row(strategy: str, results: Sequence[Result]) -> str:
    reached = [r.time_to_target_s for r in results if r.time_to_target_s is not None]
    megabytes = [r.bytes_to_target / 1e6 for r in results if r.bytes_to_target is not None]
    cells = [
        f"`{strategy}`",
        _mean(reached),
        f"{len(reached)} of {len(results)}",
        _mean(megabytes, 0),
        _mean([100 * (r.final_accuracy or 0.0) for r in results]),
        _mean([100 * (r.best_accuracy or 0.0) for r in results]),
        _mean([r.updates_applied for r in results], 0),
        _mean([r.staleness.mean for r in results]),
    ]
    return "| " + " | ".join(cells) + " |"


def _paired(finals: Finals) -> list[str]:
    """Seed by seed: virtual seconds to the target, and the ratio to FedAvg's."""
    lines = ["| seed | " + " | ".join(f"`{s}`" for s in finals) + " |", "|---" * (len(finals) + 1) + "|"]
    base = [r.time_to_target_s for r in finals["fedavg"]]
    for i, reference in enumerate(base):
        cells = []
        for results in finals.values():
            t = results[i].time_to_target_s
            ratio = f" ({reference / t:.2f}x)" if t and reference else ""
            cells.append("not reached" if t is None else f"{t:.0f} s{ratio}")
        lines.append(f"| {finals['fedavg'][i].seed} | " + " | ".join(cells) + " |")
    return lines


def _document(tuned: Tuned, finals: Finals, minutes: float) -> str:
    fleet, client = BASE["fleet"], BASE["client"]
    return f"""# Study: rounds or none, on 100 unequal devices

Made by `python -m benchmarks.study_foundation`; do not edit. This run took {minutes:.0f} minutes on
{os.cpu_count()} cores.

Fashion-MNIST, a CNN of 99,806 parameters, {fleet["clients"]} devices, Dirichlet
{fleet["dirichlet_alpha"]}, at most {fleet["examples_per_client"]} images a device,
{fleet["speed_levels"]} evenly spaced speeds with slowest/fastest = {fleet["speed_ratio"]:g}
({fleet["step_time_s"]} s a step for the fastest), {client["epochs"]} local epochs, batch
{client["batch_size"]}, no momentum. At most {CONCURRENCY} devices train at a time. Bandwidth is
unlimited, latency 50 ms, nobody drops out. Time is virtual: the target is {TARGET:.0%} on the test
part within {HORIZON_S:.0f} s, looked at every {BASE["run"]["evaluate_every_s"]:g} s.

Seeds {", ".join(map(str, SEEDS))}, paired: the same devices, data and first weights under every strategy.
Mean ± standard deviation.

| strategy | time to target, s | reached | MB to target | final accuracy, % | best, % | updates | staleness |
|---|---|---|---|---|---|---|---|
{_lines(_row(s, r) for s, r in finals.items())}

![accuracy against virtual time]({NAME}.svg)

Seed by seed, with the speed-up over `fedavg`:

{_lines(_paired(finals))}

## Tuning

Eight points a strategy (four learning rates, two values of its own parameter), each on seeds
{", ".join(map(str, TUNING_SEEDS))}, judged by the mean time to the target on the validation part;
a run that never got there counts {2 * HORIZON_S:.0f} s.

| strategy | learning rate | own parameter | validation, s | chosen |
|---|---|---|---|---|
{_lines(_tuning(tuned))}
"""


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _tuning(tuned: Tuned) -> Iterator[str]:
    for strategy, (best, scores) in tuned.items():
        for point, score in scores:
            own = ", ".join(f"{k} = {v:g}" for k, v in point.params.items())
            chosen = "**yes**" if point == best else ""
            yield f"| `{strategy}` | {point.learning_rate:g} | {own} | {score:.0f} | {chosen} |"


def _write(text: str, tuned: Tuned, finals: Finals) -> None:
    publish(STUDIES / f"{NAME}.md", text, __file__)
    (STUDIES / f"{NAME}.svg").write_text(
        comparison_svg([replace(r, config={}) for rs in finals.values() for r in rs]), encoding="utf-8"
    )
    data = {
        "tuned": {
            s: {"chosen": asdict(p), "scores": [[asdict(q), t] for q, t in g]} for s, (p, g) in tuned.items()
        },
        "runs": [
            {
                "strategy": r.strategy,
                "seed": r.seed,
                "time_to_target_s": r.time_to_target_s,
                "bytes_to_target": r.bytes_to_target,
                "final_accuracy": r.final_accuracy,
                "best_accuracy": r.best_accuracy,
                "updates_applied": r.updates_applied,
                "model_sha256": r.model_sha256,
                "journal_sha256": r.journal_sha256,
            }
            for rs in finals.values()
            for r in rs
        ],
    }
    (STUDIES / f"{NAME}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
