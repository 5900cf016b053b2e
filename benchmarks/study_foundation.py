"""Do asynchronous strategies reach a target sooner than rounds? 100 unequal devices, Fashion-MNIST.

    python -m benchmarks.study_foundation [--quick]

Each strategy gets the same tuning budget: a grid of eight points, judged by the time to the target on
the validation part, on seeds that the comparison does not use. The tuned strategies then run on the
paired seeds and are measured on the test part. Writes `docs/studies/foundation.md`, `.svg` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.reports.compare import comparison_svg
from anabranch.reports.result import Result
from benchmarks.studies import (
    STUDIES,
    Finals,
    Method,
    Tables,
    Tuned,
    compare,
    grid,
    mean,
    plain,
    pool_of,
    publish,
    table,
    tune,
    tuning_rows,
)

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
# What is not in a grid keeps its default. At most CONCURRENCY devices train at a time under every strategy.
ASYNC: Tables = {"server": {"concurrency": CONCURRENCY}}
ROUNDS = {"clients_per_round": 16, "over_selection": CONCURRENCY / 16, "deadline_s": 60.0}
METHODS: dict[str, Method] = {
    "fedavg": ("fedavg", {}, ROUNDS, {"clients_per_round": (8, 16)}),
    "fedprox": ("fedprox", {}, ROUNDS, {"mu": (0.01, 0.1)}),
    "fedasync": ("fedasync", ASYNC, {}, {"alpha": (0.3, 0.6)}),
    "fedbuff": ("fedbuff", ASYNC, {}, {"buffer_size": (5, 10)}),
}


def main() -> None:
    """Tune, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed each, a short horizon; into /tmp")
    quick = parser.parse_args().quick
    started, folder = time.monotonic(), Path("/tmp") if quick else STUDIES
    tuning_seeds, seeds = (TUNING_SEEDS[:1], SEEDS[:1]) if quick else (TUNING_SEEDS, SEEDS)
    if quick:
        BASE["run"]["virtual_s_max"] = 40.0
    with pool_of("fork" if quick else "spawn") as pool:
        grids = {m: grid(m, method, (BASE,), LEARNING_RATES) for m, method in METHODS.items()}
        tuned = {m: tune(pool, points, tuning_seeds, HORIZON_S) for m, points in grids.items()}
        finals = {m: compare(pool, t.best, seeds) for m, t in tuned.items()}
    _write(folder, tuned, finals, (time.monotonic() - started) / 60)


def _row(strategy: str, results: Sequence[Result]) -> list[str]:
    reached = [r.time_to_target_s for r in results if r.time_to_target_s is not None]
    return [
        f"`{strategy}`",
        mean(reached),
        f"{len(reached)} of {len(results)}",
        mean((r.bytes_to_target / 1e6 for r in results if r.bytes_to_target is not None), 0),
        mean(100 * (r.final_accuracy or 0.0) for r in results),
        mean(100 * (r.best_accuracy or 0.0) for r in results),
        mean((r.updates_applied for r in results), 0),
        mean(r.staleness.mean for r in results),
    ]


HEAD = (
    *("strategy", "time to target, s", "reached", "MB to target"),
    *("final accuracy, %", "best, %", "updates", "staleness"),
)


def _paired(finals: Finals) -> Iterator[list[str]]:
    """Seed by seed: virtual seconds to the target, and the ratio to FedAvg's."""
    for reference, *of_seed in zip(finals["fedavg"], *finals.values(), strict=True):
        base, times = reference.time_to_target_s, [r.time_to_target_s for r in of_seed]
        ratios = [f" ({base / t:.2f}x)" if t and base else "" for t in times]
        told = ["not reached" if t is None else f"{t:.0f} s{x}" for t, x in zip(times, ratios, strict=True)]
        yield [str(reference.seed), *told]


def _document(tuned: Mapping[str, Tuned], finals: Finals, minutes: float) -> str:
    fleet, client, points = BASE["fleet"], BASE["client"], {m: t.plain() for m, t in tuned.items()}
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

{table(HEAD, (_row(s, r) for s, r in finals.items()))}

![accuracy against virtual time]({NAME}.svg)

Seed by seed, with the speed-up over `fedavg`:

{table(("seed", *(f"`{s}`" for s in finals)), _paired(finals))}

## Tuning

Eight points a strategy (four learning rates, two values of its own parameter), each on seeds
{", ".join(map(str, TUNING_SEEDS))}, judged by the mean time to the target on the validation part;
a run that never got there counts {2 * HORIZON_S:.0f} s.

{table(("strategy", "point", "validation, s", "chosen"), tuning_rows(points))}
"""


def _write(folder: Path, tuned: Mapping[str, Tuned], finals: Finals, minutes: float) -> None:
    publish(folder / f"{NAME}.md", _document(tuned, finals, minutes), __file__)
    named = [replace(r, config={}) for rs in finals.values() for r in rs]
    (folder / f"{NAME}.svg").write_text(comparison_svg(named), encoding="utf-8")
    data: dict[str, Any] = {"minutes": minutes, "tuned": {m: t.plain() for m, t in tuned.items()}}
    data["runs"] = {m: plain(rs) for m, rs in finals.items()}
    (folder / f"{NAME}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
