"""What sub-models save: AsyncDrop, its family, TEASQ on sub-models, and asynchronous baselines.

    python -m benchmarks.study_asyncdrop [--quick | --render | --again METHOD]

The paper's setting scaled to two cores: 104 devices, 8 in training at a time, 8 speeds with a ratio of 5,
data that go with the speed, a small ResNet on Fashion-MNIST. Each method gets the same tuning budget: six
points, judged by the time to the target on the validation part, on a seed that the comparison does not use.
The tuned methods then run on paired seeds and are measured on the test part. Writes
`docs/studies/asyncdrop.*`. `--again` repeats the comparison, not the tuning, of a method
whose code has changed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.reports.compare import comparison_svg
from anabranch.reports.result import Point as Measured
from anabranch.reports.result import Result
from benchmarks.studies import (
    STUDIES,
    Finals,
    Method,
    Point,
    Scores,
    Tables,
    chosen_of,
    compare,
    grid,
    late_accuracy,
    mean,
    plain,
    pool_of,
    publish,
    reached,
    study_parser,
    table,
    tune,
    tuning_rows,
)

NAME = "asyncdrop"

HORIZON_S = 100.0
IN_A_ROW = 3  # evaluations whose mean must be at the target: on such data accuracy swings
TUNING_SEEDS = (101,)
SEEDS = (1, 2, 3)
DEVICES, CONCURRENCY = 104, 8
REFERENCE = "async fedavg"

BASE: dict[str, dict[str, Any]] = {
    "run": {
        "name": f"study-{NAME}",
        "workload": "fashion-mnist-resnet",
        "virtual_s_max": HORIZON_S,
        "evaluate_every_s": 4.0,
        "evaluate_every_versions": 0,
        "keep_payloads": False,
        "target_accuracy": 0.55,
    },
    "fleet": {
        "clients": DEVICES,
        "split": "speed-shards",
        "shards_per_client": 2,
        "speed": "levels",
        "speed_ratio": 5.0,
        "speed_levels": 8,
        "step_time_s": 0.02,
        "up_mbps": 10.0,
        "down_mbps": 40.0,
    },
    "server": {"concurrency": CONCURRENCY},
    "client": {"batch_size": 32, "steps": 20, "momentum": 0.9},
}

LEARNING_RATES = (0.003, 0.01, 0.03)
CONSTANT: dict[str, Any] = {"rho": 0.0, "staleness": {"name": "constant"}}
TEASQ: dict[str, Any] = {"concurrency_fraction": CONCURRENCY / DEVICES, "mu": 0.0}
WHOLE: Tables = {"submodel": {"name": "none"}}
ALPHAS: dict[str, Sequence[float]] = {"alpha": (0.25, 0.5)}


def planned(name: str) -> Tables:
    """The planner of a method."""
    return {"submodel": {"name": name}}


METHODS: dict[str, Method] = {
    "async fedavg": ("fedasync", WHOLE, CONSTANT, ALPHAS),
    "async fedprox": ("fedasync", WHOLE, {**CONSTANT, "rho": 0.01}, ALPHAS),
    "fedbuff (K = 4)": ("fedbuff", WHOLE, {"buffer_size": 4}, {"server_lr": (0.5, 1.0)}),
    "fjord's widths": ("asyncdrop", planned("fjord"), {}, ALPHAS),
    "asyncdrop": ("asyncdrop", planned("random"), {}, ALPHAS),
    "hetero asyncdrop": ("asyncdrop", planned("hetero"), {}, ALPHAS),
    "teasq": ("teasq", WHOLE, TEASQ, {"cache_size": (4, 8)}),
    "teasq_drop": ("teasq_drop", planned("hetero"), TEASQ, {"cache_size": (4, 8)}),
}
# The same tuned points in a fleet that changes: whose steps are not shorter, or whose devices leave.
SAME_STEPS: Tables = {"fleet": {"submodel_step": "whole"}}
LEAVING: Tables = {"fleet": {"leavers": 0.5}}
CHANGED: dict[str, tuple[str, Tables]] = {
    "hetero asyncdrop, steps as long": ("hetero asyncdrop", SAME_STEPS),
    "teasq_drop, steps as long": ("teasq_drop", SAME_STEPS),
    "async fedavg, half leave": ("async fedavg", LEAVING),
    "fedbuff (K = 4), half leave": ("fedbuff (K = 4)", LEAVING),
    "hetero asyncdrop, half leave": ("hetero asyncdrop", LEAVING),
    "teasq_drop, half leave": ("teasq_drop", LEAVING),
}


def points_of(method: str) -> list[Point]:
    """The six points of a method."""
    return grid(method, METHODS[method], (BASE,), LEARNING_RATES)


def main() -> None:
    """Tune, compare, write."""
    parser = study_parser(__doc__, "one seed each, a short horizon, docs untouched")
    parser.add_argument(
        "--again", action="append", choices=[*METHODS, *CHANGED], default=[], metavar="METHOD"
    )
    arguments = parser.parse_args()
    data_file = Path("/tmp/study-asyncdrop.json") if arguments.quick else STUDIES / f"{NAME}.json"
    if arguments.again:
        _repeat(data_file, arguments.again)
    elif not arguments.render:
        _run(data_file, arguments.quick)
    _write(json.loads(data_file.read_text(encoding="utf-8")), data_file.parent)


def _run(data_file: Path, quick: bool) -> None:
    if quick:
        BASE["run"]["virtual_s_max"] = 3.0
    started = time.monotonic()
    data: dict[str, Any] = {"tuned": {}, "runs": {}}
    with pool_of("fork" if quick else "spawn") as pool:
        for method in METHODS:
            found = tune(pool, points_of(method), TUNING_SEEDS, HORIZON_S, IN_A_ROW)
            data["tuned"][method] = found.plain()
            data_file.write_text(json.dumps(data) + "\n", encoding="utf-8")
        for method in [*METHODS, *CHANGED]:
            data["runs"][method] = _compared(pool, data, method, SEEDS[:1] if quick else SEEDS)
            data["minutes"] = (time.monotonic() - started) / 60
            data_file.write_text(json.dumps(data) + "\n", encoding="utf-8")


def _repeat(data_file: Path, methods: Sequence[str]) -> None:
    data, started = json.loads(data_file.read_text(encoding="utf-8")), time.monotonic()
    before = data["minutes"]
    with pool_of() as pool:
        for method in methods:
            data["runs"][method] = _compared(pool, data, method, SEEDS)
            data["minutes"] = before + (time.monotonic() - started) / 60
            data_file.write_text(json.dumps(data) + "\n", encoding="utf-8")


def _compared(pool: ProcessPoolExecutor, data: Mapping[str, Any], method: str, seeds: Sequence[int]) -> Any:
    """The tuned point of a method, or of the one whose fleet is changed, on the seeds."""
    tuned, extra = CHANGED.get(method, (method, {}))
    point = chosen_of(points_of(tuned), data["tuned"][tuned])
    return plain(compare(pool, replace(point, method=method, layers=(*point.layers, extra)), seeds))


# --- what is read -----------------------------------------------------------------------------------


def at_target(result: Result) -> Measured | None:
    """The evaluation at which the mean of `IN_A_ROW` was at the target."""
    return reached(result.history, result.target_accuracy, IN_A_ROW)


def _traffic(p: Measured) -> float:
    return (p.uplink_bytes + p.downlink_bytes) / 1e6


def _row(method: str, results: Sequence[Result], reference: Sequence[Result]) -> list[str]:
    found = [p for r in results if (p := at_target(r)) is not None]
    pairs = [(at_target(a), at_target(b)) for a, b in zip(results, reference, strict=True)]
    both = [(mine, theirs) for mine, theirs in pairs if mine and theirs]
    return [
        method,
        mean(p.time_s for p in found),
        f"{len(found)} of {len(results)}",
        mean((_traffic(p) for p in found), 2),
        mean((theirs.time_s / mine.time_s for mine, theirs in both), 2),
        mean((_traffic(theirs) / _traffic(mine) for mine, theirs in both), 1),
        mean(late_accuracy(r) for r in results),
        mean((r.updates_applied for r in results), 0),
        mean((r.uplink_bytes / 1e6 for r in results), 1),
        mean((r.downlink_bytes / 1e6 for r in results), 1),
    ]


HEAD = (
    "method",
    "time to target, s",
    "reached",
    "both ways to target, MB",
    f"times sooner than {REFERENCE}",
    "times fewer bytes",
    "last fifth, %",
    "updates",
    "up, MB",
    "down, MB",
)


def document(tuned: Mapping[str, Scores], finals: Finals, minutes: float) -> str:
    """The page."""
    fleet, client, run = BASE["fleet"], BASE["client"], BASE["run"]
    step_s, ratio, shards = fleet["step_time_s"], fleet["speed_ratio"], fleet["shards_per_client"]
    up, down, momentum = fleet["up_mbps"], fleet["down_mbps"], client["momentum"]
    every_s, seeds = run["evaluate_every_s"], ", ".join(map(str, SEEDS))
    tuning = ", ".join(map(str, TUNING_SEEDS))
    rows = [_row(m, rs, finals[REFERENCE]) for m, rs in finals.items()]
    return f"""# Study: sub-models in an asynchronous fleet

Made by `python -m benchmarks.study_asyncdrop`; do not edit. This run took {minutes:.0f} minutes on
{os.cpu_count()} cores.

AsyncDrop's setting, scaled down: Fashion-MNIST, a ResNet of 77,978 numbers, {DEVICES} devices of which
{CONCURRENCY} train at a time, {fleet["speed_levels"]} evenly spaced speeds with slowest/fastest = {ratio:g}
({step_s} s a step for the fastest); each speed has {shards} of 16 runs of the examples sorted by label, each
device a random half of them. {client["steps"]} local steps of batch {client["batch_size"]}, momentum
{momentum:g} that starts anew with each task. {up:g} Mbit/s up, {down:g} Mbit/s down, latency 50 ms.
Sub-models leave out a quarter of the inner channels of every block; a step of one takes its share of the
whole model's floating-point operations, but for the rows "steps as long". Time is virtual, {HORIZON_S:g} s of
it, looked at every {every_s:g} s. The target is {run["target_accuracy"]:.0%}, reached when the mean of
{IN_A_ROW} evaluations in a row is there. Seeds {seeds}, paired: the same devices, data and first weights
under every method. Mean ± standard deviation; "times sooner" and "times fewer bytes" (both ways, to the
target) are means of the ratios of pairs of which both got there.

{table(HEAD, rows)}

![accuracy against virtual time]({NAME}.svg)

Tuning: six points a method on seed {tuning}, judged by the time to the target on the validation part; a run
that never got there counts {2 * HORIZON_S:.0f} s. The rows below the first {len(METHODS)} are tuned points in
another fleet.

{table(("method", "point", "validation, s", "chosen"), tuning_rows(tuned))}
"""


def _write(data: Mapping[str, Any], folder: Path) -> None:
    finals = {m: [Result.from_json(r) for r in rs] for m, rs in data["runs"].items()}
    named = [replace(r, strategy=m) for m in METHODS for r in finals[m]]
    (folder / f"{NAME}.svg").write_text(comparison_svg(named), encoding="utf-8")
    text = document(data["tuned"], finals, data["minutes"])
    publish(folder / f"{NAME}.md", text, __file__)


if __name__ == "__main__":
    main()
