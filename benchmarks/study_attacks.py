"""What hostile devices do to a federation, with and without a robust rule.

    python -m benchmarks.study_attacks [--quick | --render]

100 unequal devices, Fashion-MNIST, a fifth of them hostile: every attack of the simulator against FedBuff
with its own mean, with the recommended table, and with each other rule. Paired seeds: the same devices,
data, first weights and attackers under every defence. Goals: at most 3 points lost with the recommended
table, 20 or more without any for at least three attacks. Writes `docs/study-attacks.md` and `.json`; what is
in the `.json` is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anabranch.reports.result import Result
from benchmarks.studies import Point, Tables, mean, plain, pool_of, run, table

DOCS = Path(__file__).parents[1] / "docs"
NAME = "study-attacks"

SEEDS = (1, 2, 3)
HORIZON_S = 200.0
ATTACKERS = 0.2
GOAL_LOST, GOAL_TEETH, TOOTHED = 3.0, 20.0, 3

BASE: dict[str, dict[str, Any]] = {
    "run": {
        "name": NAME,
        "workload": "fashion-mnist",
        "virtual_s_max": HORIZON_S,
        "evaluate_every_s": 10.0,
        "evaluate_every_versions": 0,
        "keep_payloads": False,
    },
    "fleet": {
        "clients": 100,
        "examples_per_client": 200,
        "split": "dirichlet",
        "dirichlet_alpha": 1.0,
        "speed": "levels",
        "speed_ratio": 5.0,
        "speed_levels": 8,
        "step_time_s": 0.1,
    },
    "strategy": {"name": "fedbuff", "buffer_size": 10},
    "server": {"concurrency": 20},
    "client": {"batch_size": 20, "epochs": 2, "learning_rate": 0.1},
}

NOBODY = "nobody"
ATTACKS = (NOBODY, "sign_flip", "scale", "alie", "ipm", "label_flip", "nan", "flood")
RECOMMENDED = "recommended"
DEFENCES: dict[str, dict[str, Any]] = {
    "none": {},
    RECOMMENDED: {
        "rule": "multi_krum",
        "attackers": 0.3,
        "clip": 2.0,
        "buffer_max": 1,
        "flaws_max": 3,
    },
    "clip alone": {"clip": 2.0},
    "geometric median": {"rule": "geometric_median", "clip": 2.0, "buffer_max": 1},
    "median": {"rule": "median", "clip": 2.0, "buffer_max": 1},
    "trimmed mean": {"rule": "trimmed_mean", "attackers": 0.4, "clip": 2.0, "buffer_max": 1},
    "centred clipping": {"rule": "centred_clipping", "clip": 2.0, "buffer_max": 1},
}

Found = Mapping[str, Mapping[str, Sequence[Result]]]


def point(defence: str, attack: str) -> Point:
    """One cell of the study."""
    hostile = {} if attack == NOBODY else {"attackers": ATTACKERS, "attack": attack}
    tables: Tables = {"fleet": hostile, "robust": DEFENCES[defence]}
    return Point(f"{defence}, {attack}", (BASE, tables), {})


def late_accuracy(result: Result) -> float:
    """Mean accuracy, in %, over the last fifth of the run: the end, without the noise of one moment."""
    end_s = result.history[-1].time_s
    return statistics.fmean(100 * p.accuracy for p in result.history if p.time_s >= 0.8 * end_s)


def lost(found: Found, defence: str, attack: str) -> list[float]:
    """Points that each seed lost against the same seed without attackers and without a defence."""
    clean = found["none"][NOBODY]
    return [late_accuracy(a) - late_accuracy(b) for a, b in zip(clean, found[defence][attack], strict=True)]


def measure(data_file: Path, seeds: Sequence[int], start: str) -> None:
    """Run every cell; what is there already is kept, so an interrupted study goes on."""
    began = time.monotonic()
    data = json.loads(data_file.read_text(encoding="utf-8")) if data_file.exists() else {}
    data = data or {"minutes": 0.0, "runs": {}}
    before = data["minutes"]
    with pool_of(start) as pool:
        for defence, attack in itertools.product(DEFENCES, ATTACKS):
            runs = data["runs"].setdefault(defence, {})
            if attack in runs:
                continue
            jobs = [(point(defence, attack), seed, "test", 1) for seed in seeds]
            results = list(pool.map(run, jobs))
            runs[attack] = plain(results)
            data["minutes"] = before + (time.monotonic() - began) / 60
            data_file.write_text(json.dumps(data) + "\n", encoding="utf-8")
            accuracies = ", ".join(f"{late_accuracy(r):.1f}" for r in results)
            print(f"{defence}, {attack}: {accuracies}", flush=True)


# --- the page ---------------------------------------------------------------------------------------


def _rows(found: Found) -> Iterator[list[str]]:
    for attack in ATTACKS:
        yield [attack, *(mean(late_accuracy(r) for r in found[d][attack]) for d in DEFENCES)]


def _losses(found: Found) -> Iterator[list[str]]:
    for attack in ATTACKS:
        yield [attack, *(mean(lost(found, d, attack)) for d in DEFENCES)]


def goals(found: Found) -> list[str]:
    """The goals, and whether they were reached."""
    hostile = [a for a in ATTACKS if a != NOBODY]
    kept = [a for a in hostile if statistics.fmean(lost(found, RECOMMENDED, a)) <= GOAL_LOST]
    bitten = [a for a in hostile if statistics.fmean(lost(found, "none", a)) >= GOAL_TEETH]
    missed = sorted(set(hostile) - set(kept))
    return [
        f"At most {GOAL_LOST:g} points lost with the recommended table: "
        + ("reached for every attack." if not missed else f"**missed** for {', '.join(missed)}."),
        f"{GOAL_TEETH:g} points or more lost without a defence, for at least {TOOTHED} attacks: "
        + ("reached" if len(bitten) >= TOOTHED else "**missed**")
        + f" ({', '.join(bitten) or 'none'}).",
    ]


def document(found: Found, minutes: float) -> str:
    """The page."""
    fleet, client = BASE["fleet"], BASE["client"]
    settings = ", ".join(f"{k} = {json.dumps(v)}" for k, v in DEFENCES[RECOMMENDED].items())
    seeds = [r.seed for r in found["none"][NOBODY]]
    listed = "\n".join(f"- {goal}" for goal in goals(found))
    return f"""# Study: hostile devices

Made by `python -m benchmarks.study_attacks`; do not edit. This run took {minutes:.0f} minutes on
{os.cpu_count()} cores.

Fashion-MNIST, a CNN of 99,806 parameters, {fleet["clients"]} devices with at most
{fleet["examples_per_client"]} images each (Dirichlet {fleet["dirichlet_alpha"]:g}), slowest/fastest =
{fleet["speed_ratio"]:g}; {client["epochs"]} local epochs, batch {client["batch_size"]}, learning rate
{client["learning_rate"]:g}; FedBuff with K = {BASE["strategy"]["buffer_size"]},
{BASE["server"]["concurrency"]} devices at a time, {HORIZON_S:g} virtual seconds. With an attack
{ATTACKERS:.0%} of the devices are hostile ([what they send](robust.md#attacks)). Seeds
{", ".join(map(str, seeds))}, paired. Mean ± standard deviation.

Recommended: `[robust] {settings}`.

{listed}

## Accuracy over the last fifth of the run, %

{table(("attack", *DEFENCES), _rows(found))}

## Points lost against nobody attacking and no defence

{table(("attack", *DEFENCES), _losses(found))}
"""


def main() -> None:
    """Measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, a short horizon, docs untouched")
    parser.add_argument("--render", action="store_true", help="write the page of the figures that are there")
    arguments = parser.parse_args()
    folder = Path("/tmp") if arguments.quick else DOCS
    data_file = folder / f"{NAME}.json"
    if arguments.quick:
        BASE["run"]["virtual_s_max"] = 12.0
        data_file.unlink(missing_ok=True)
    if not arguments.render:
        quick = arguments.quick
        measure(data_file, SEEDS[:1] if quick else SEEDS, "fork" if quick else "spawn")
    data = json.loads(data_file.read_text(encoding="utf-8"))
    found = {
        d: {a: [Result.from_json(r) for r in rs] for a, rs in c.items()} for d, c in data["runs"].items()
    }
    text = document(found, data["minutes"])
    (folder / f"{NAME}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
