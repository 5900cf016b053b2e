"""What compression of both directions costs and saves: TEASQ-Fed, its ablations, and the baselines.

    python -m benchmarks.study_teasq [--quick | --render | --again METHOD]

100 unequal devices on narrow links, Fashion-MNIST, two splits. Each method gets the same tuning budget on
each split: six points, judged by the time to the target on the validation part, on a seed that the
comparison does not use. The tuned methods then run on five paired seeds and are measured on the
test part. Writes `docs/studies/teasq.md`, `.json` and a picture for each split. `--again` repeats the
comparison, not the tuning, for a method whose code has changed.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.reports.compare import comparison_svg
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

NAME = "teasq"

HORIZON_S = 320.0
TUNING_SEEDS = (101,)
SEEDS = (1, 2, 3, 4, 5)
CONCURRENCY = 20
REFERENCE, CANDIDATE = "fedbuff", "teasq"
PICTURED = ("fedavg", "fedasync", "fedbuff", "qafel", "teasq", "teasq, paper")  # more would hide each other

BASE: dict[str, dict[str, Any]] = {
    "run": {
        "name": f"study-{NAME}",
        "workload": "fashion-mnist",
        "virtual_s_max": HORIZON_S,
        "evaluate_every_s": 5.0,
        "evaluate_every_versions": 0,
        "keep_payloads": False,
    },
    "fleet": {
        "clients": 100,
        "examples_per_client": 200,
        "speed": "levels",
        "speed_ratio": 5.0,
        "speed_levels": 8,
        "step_time_s": 0.1,
        "up_mbps": 1.0,
        "down_mbps": 5.0,
    },
    "client": {"batch_size": 20, "epochs": 2},
}
# The two-class split is much harder: its target is lower, the same for every method.
SPLITS: dict[str, dict[str, dict[str, Any]]] = {
    "dirichlet": {
        "fleet": {"split": "dirichlet", "dirichlet_alpha": 0.3},
        "run": {"target_accuracy": 0.80},
    },
    "two-class": {"fleet": {"split": "shards", "shards_per_client": 2}, "run": {"target_accuracy": 0.70}},
}

LEARNING_RATES = (0.05, 0.1, 0.2)
ASYNC: Tables = {"server": {"concurrency": CONCURRENCY}}
ROUNDS = {"clients_per_round": 16, "over_selection": CONCURRENCY / 16, "deadline_s": 60.0}
TEASQ = {"concurrency_fraction": CONCURRENCY / 100}

METHODS: dict[str, Method] = {
    "fedavg": ("fedavg", {}, ROUNDS, {"clients_per_round": (8, 16)}),
    "fedprox": ("fedprox", {}, ROUNDS, {"mu": (0.01, 0.1)}),
    "fedasync": ("fedasync", ASYNC, {}, {"alpha": (0.3, 0.6)}),
    "fedbuff": ("fedbuff", ASYNC, {}, {"buffer_size": (5, 10)}),
    "qafel": ("qafel", ASYNC, {}, {"buffer_size": (5, 10)}),
    "teasq": ("teasq", {}, TEASQ, {"cache_size": (5, 10)}),
    "teasq, stronger": (
        "teasq",
        {},
        {**TEASQ, "decay_direction": "stronger"},
        {"cache_size": (5, 10)},
    ),
    "teasq, static": ("teasq", {}, {**TEASQ, "decay_every": 0}, {"cache_size": (5, 10)}),
    "teasq, no sparsification": ("teasq", {}, {**TEASQ, "kept": 1.0}, {"cache_size": (5, 10)}),
    "teasq, no quantisation": ("teasq", {}, {**TEASQ, "bits": 32}, {"cache_size": (5, 10)}),
    "teasq, no compression": (
        "teasq",
        {},
        {**TEASQ, "kept": 1.0, "bits": 32},
        {"cache_size": (5, 10)},
    ),
    "teasq, paper": ("teasq", {}, {**TEASQ, "mode": "paper"}, {"cache_size": (5, 10)}),
}


def points_of(method: str, split: str) -> list[Point]:
    """The six points of a method on a split."""
    return grid(method, METHODS[method], (BASE, SPLITS[split]), LEARNING_RATES)


def study(
    pool: ProcessPoolExecutor, split: str, tuning_seeds: Sequence[int], seeds: Sequence[int]
) -> dict[str, Any]:
    """Tune and compare every method on one split; what came of it, as JSON."""
    print(f"--- {split}", flush=True)
    tuned = {m: tune(pool, points_of(m, split), tuning_seeds, HORIZON_S) for m in METHODS}
    finals = {m: compare(pool, t.best, seeds) for m, t in tuned.items()}
    return {
        "tuned": {m: t.plain() for m, t in tuned.items()},
        "runs": {m: plain(rs) for m, rs in finals.items()},
    }


def main() -> None:
    """Tune, compare, write."""
    parser = study_parser(__doc__, "one seed each, a short horizon, docs untouched")
    parser.add_argument("--again", action="append", choices=list(METHODS), default=[], metavar="METHOD")
    arguments = parser.parse_args()
    data_file = Path("/tmp/study-teasq.json") if arguments.quick else STUDIES / f"{NAME}.json"
    if arguments.again:
        _repeat(data_file, arguments.again)
    elif not arguments.render:
        _run(data_file, arguments.quick)
    data = json.loads(data_file.read_text(encoding="utf-8"))
    _write(data, data_file.parent)


def _run(data_file: Path, quick: bool) -> None:
    started = time.monotonic()
    if quick:
        BASE["run"]["virtual_s_max"] = 12.0
    data: dict[str, Any] = {"splits": {}}
    with pool_of("fork" if quick else "spawn") as pool:
        for split in SPLITS:
            data["splits"][split] = study(pool, split, TUNING_SEEDS, SEEDS[:1] if quick else SEEDS)
            data["minutes"] = (time.monotonic() - started) / 60
            data_file.write_text(json.dumps(data) + "\n", encoding="utf-8")


def _repeat(data_file: Path, methods: Sequence[str]) -> None:
    data, started = json.loads(data_file.read_text(encoding="utf-8")), time.monotonic()
    with pool_of() as pool:
        for split, method in itertools.product(data["splits"], methods):
            found = data["splits"][split]
            point = chosen_of(points_of(method, split), found["tuned"][method])
            found["runs"][method] = plain(compare(pool, point, SEEDS))
            data_file.write_text(json.dumps(data) + "\n", encoding="utf-8")
    data["minutes"] += (time.monotonic() - started) / 60
    data_file.write_text(json.dumps(data) + "\n", encoding="utf-8")


# --- what is read -----------------------------------------------------------------------------------


def at_target(result: Result) -> tuple[float, float, float] | None:
    """Virtual seconds, uplink MB and downlink MB when the target was reached."""
    at = reached(result.history, result.target_accuracy)
    return None if at is None else (at.time_s, at.uplink_bytes / 1e6, at.downlink_bytes / 1e6)


def accuracy_at(result: Result, time_s: float) -> float:
    """The newest accuracy, in %, that was measured by then."""
    return 100 * [p.accuracy or 0.0 for p in result.history if p.time_s <= time_s][-1]


def _row(method: str, results: Sequence[Result]) -> list[str]:
    there = [found for r in results if (found := at_target(r)) is not None]
    return [
        method,
        mean(t for t, _, _ in there),
        f"{len(there)} of {len(results)}",
        mean((u for _, u, _ in there), 2),
        mean((d for _, _, d in there), 1),
        mean(accuracy_at(r, HORIZON_S / 4) for r in results),
        mean(accuracy_at(r, HORIZON_S / 2) for r in results),
        mean(late_accuracy(r) for r in results),
        mean((r.updates_applied for r in results), 0),
        mean((r.uplink_bytes / 1e6 for r in results), 1),
        mean((r.downlink_bytes / 1e6 for r in results), 1),
    ]


HEAD = (
    "method",
    "time to target, s",
    "reached",
    "up to target, MB",
    "down to target, MB",
    "accuracy at 100 s, %",
    "at 200 s, %",
    "last fifth, %",
    "updates",
    "up, MB",
    "down, MB",
)


def _pairs(finals: Finals) -> str:
    """Seed by seed: the candidate against FedBuff and FedAvg."""
    rows = []
    for mine, buffered, rounds in zip(finals[CANDIDATE], finals[REFERENCE], finals["fedavg"], strict=True):
        a, b, c = at_target(mine), at_target(buffered), at_target(rounds)
        rows.append(
            [
                str(mine.seed),
                _ratio(b, a, 0),
                _ratio(c, a, 0),
                _ratio(b, a, 1),
                _ratio(b, a, 2),
                f"{late_accuracy(mine) - late_accuracy(buffered):+.1f}",
            ]
        )
    head = (
        "seed",
        "sooner than FedBuff",
        "sooner than FedAvg",
        "fewer bytes up",
        "fewer bytes down",
        "points at the end",
    )
    return table(head, rows)


def _ratio(theirs: tuple[float, ...] | None, mine: tuple[float, ...] | None, which: int) -> str:
    if mine is None or theirs is None:
        return "not reached by " + ("both" if mine is theirs else "TEASQ" if mine is None else "the other")
    return f"{theirs[which] / mine[which]:.2f}x"


def document(found: Mapping[str, tuple[Mapping[str, Scores], Finals]], minutes: float) -> str:
    """The page."""
    fleet, client = BASE["fleet"], BASE["client"]
    parts = [
        f"""# Study: TEASQ-Fed and its ablations on narrow links

Made by `python -m benchmarks.study_teasq`; do not edit. This run took {minutes:.0f} minutes on
{os.cpu_count()} cores.

Fashion-MNIST, a CNN of 99,806 parameters, {fleet["clients"]} devices with at most
{fleet["examples_per_client"]} images each, {fleet["speed_levels"]} evenly spaced speeds with
slowest/fastest = {fleet["speed_ratio"]:g} ({fleet["step_time_s"]} s a step for the fastest),
{fleet["up_mbps"]:g} Mbit/s up, {fleet["down_mbps"]:g} Mbit/s down, latency 50 ms; {client["epochs"]}
local epochs, batch {client["batch_size"]}, no momentum. At most {CONCURRENCY} devices train at a time
under every method. Time is virtual, {HORIZON_S:g} s of it, looked at every
{BASE["run"]["evaluate_every_s"]:g} s. Seeds {", ".join(map(str, SEEDS))}, paired: the same devices, data
and first weights under every method. Mean ± standard deviation. Bytes are those of the encoded
payloads; "to target" counts the runs that got there.
"""
    ]
    for split, (tuned, finals) in found.items():
        target = SPLITS[split]["run"]["target_accuracy"]
        parts.append(
            f"""## {split}, target {target:.0%}

{table(HEAD, (_row(m, rs) for m, rs in finals.items()))}

![accuracy against virtual time, {split}]({NAME}-{split}.svg)

Seed by seed, `{CANDIDATE}` (robust) against the two references:

{_pairs(finals)}

Tuning: six points a method on seed {", ".join(map(str, TUNING_SEEDS))}, judged by the time to the target on
the validation part; a run that never got there counts {2 * HORIZON_S:.0f} s.

{table(("method", "point", "validation, s", "chosen"), tuning_rows(tuned))}
"""
        )
    return "\n".join(parts)


def _write(data: Mapping[str, Any], folder: Path) -> None:
    found: dict[str, tuple[Mapping[str, Scores], Finals]] = {}
    for split, part in data["splits"].items():
        finals = {m: [Result.from_json(r) for r in rs] for m, rs in part["runs"].items()}
        found[split] = part["tuned"], finals
        named = [replace(r, strategy=m) for m in PICTURED for r in finals[m]]
        (folder / f"{NAME}-{split}.svg").write_text(comparison_svg(named), encoding="utf-8")
    text = document(found, data["minutes"])
    publish(folder / f"{NAME}.md", text, __file__)


if __name__ == "__main__":
    main()
