"""What hostile devices do to a federation, with and without a robust rule.

    python -m benchmarks.study_attacks [--quick | --render] [--workers N]

100 unequal devices, Fashion-MNIST, a fifth of them hostile: every attack of the simulator against FedBuff
with its own mean, and with the rule that tuning recommends. Paired seeds: the same devices, data, first
weights and attackers under both. Goals: at most 3 points lost with the rule, 20 or more without any for at
least three attacks.

Tuning is on a seed that the study does not use: the learning rate for the plain mean when nobody attacks,
then the rules at that rate, two of them with two assumed shares of attackers, of which the one whose worst
case is best is recommended. Writes
`docs/studies/attacks.md`, `.json` and a picture; what is in the `.json` is not run again.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.reports.page import standalone
from anabranch.reports.result import Result
from anabranch.reports.svg import WIDTH, legend, rect, svg, text
from benchmarks.studies import (
    STUDIES,
    Point,
    Tables,
    late_accuracy,
    mean,
    plain,
    pool_of,
    publish,
    run,
    study_parser,
    table,
)

NAME = "attacks"

SEEDS = (11, 12, 13)
TUNING_SEED = 101
HORIZON_S = 120.0
ATTACKERS = 0.2
GOAL_LOST, GOAL_TEETH, TOOTHED = 3.0, 20.0, 3

BASE: dict[str, dict[str, Any]] = {
    "run": {
        "name": f"study-{NAME}",
        "workload": "fashion-mnist",
        "virtual_s_max": HORIZON_S,
        "evaluate_every_s": 10.0,
        "evaluate_every_versions": 0,
        "keep_payloads": False,
        "target_accuracy": 1.0,  # a tuning run would end where it gets there
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
    "strategy": {"name": "fedbuff", "buffer_size": 20},
    "server": {"concurrency": 40},
    "client": {"batch_size": 20, "epochs": 2, "learning_rate": 0.2},
}

NOBODY = "nobody"
ATTACKS = (NOBODY, "sign_flip", "scale", "alie", "ipm", "label_flip", "nan", "flood")
NONE = "none"
SHARED = {"clip": 2.0, "buffer_max": 1, "flaws_max": 3}
# Of twenty updates eight are hostile once in some hundred versions when a fifth of the devices is.
RULES: dict[str, dict[str, Any]] = {
    "multi-Krum": {"rule": "multi_krum", "attackers": 0.4, **SHARED},
    "multi-Krum, three tenths": {"rule": "multi_krum", "attackers": 0.3, **SHARED},
    "neighbour mixing": {"rule": "neighbour_mixing", "attackers": 0.4, **SHARED},
    "neighbour mixing, three tenths": {"rule": "neighbour_mixing", "attackers": 0.3, **SHARED},
    "geometric median": {"rule": "geometric_median", **SHARED},
    "trimmed mean": {"rule": "trimmed_mean", "attackers": 0.4, **SHARED},
    "centred clipping": {"rule": "centred_clipping", **SHARED},
}
DEFENCES: dict[str, dict[str, Any]] = {NONE: {}, **RULES}
LEARNING_RATES = (0.05, 0.1, 0.2, 0.4)
# What a rule costs; the largest updates; those that hide among the honest ones; those that pull against them.
TUNED_UNDER = (NOBODY, "scale", "alie", "ipm")

Found = Mapping[str, Mapping[str, Sequence[Result]]]
Tuning = Mapping[str, Mapping[str, Mapping[str, float]]]  # by grid, point and attack: accuracy in %


def point(defence: str, attack: str) -> Point:
    """One cell of the study."""
    hostile = {} if attack == NOBODY else {"attackers": ATTACKERS, "attack": attack}
    tables: Tables = {"fleet": hostile, "robust": DEFENCES[defence]}
    return Point(f"{defence}, {attack}", (BASE, tables), {})


def lost(found: Found, defence: str, attack: str) -> list[float]:
    """Points that each seed lost against the same seed without attackers and without a defence."""
    clean, hostile = found[NONE][NOBODY], found[defence].get(attack, ())
    return [late_accuracy(a) - late_accuracy(b) for a, b in zip(clean, hostile, strict=False)]


def recommended(tuning: Tuning) -> str:
    """The rule whose worst case in tuning is the best."""
    found = tuning["rule"]
    return max(found, key=lambda rule: min(found[rule].values()))


def tuning_points() -> Iterator[tuple[str, str, str, Point]]:
    """The tuning runs: of which grid, which point of it, under which attack, and the run."""
    grid = [(NONE, f"learning_rate = {rate:g}", NONE, NOBODY, rate) for rate in LEARNING_RATES]
    chosen = BASE["client"]["learning_rate"]
    grid += [("rule", rule, rule, attack, chosen) for rule in RULES for attack in TUNED_UNDER]
    for name, label, defence, attack, rate in grid:
        cell, tables = point(defence, attack), {"client": {"learning_rate": rate}}
        yield name, label, attack, replace(cell, layers=(*cell.layers, tables))


def measure(data_file: Path, seeds: Sequence[int], workers: int) -> None:
    """Run every cell; what is there already is kept, so an interrupted study goes on."""
    started = time.monotonic()
    data = json.loads(data_file.read_text(encoding="utf-8")) if data_file.exists() else {}
    data = {"minutes": 0.0, "runs": {}, "tuning": {}, **data}
    before = data["minutes"]

    def keep(said: str, result: Result) -> None:
        data["minutes"] = before + (time.monotonic() - started) / 60
        data_file.write_text(json.dumps(data) + "\n", encoding="utf-8")
        print(f"{said}: {late_accuracy(result):.1f}", flush=True)

    with pool_of(workers=workers) as pool:
        trials = [t for t in tuning_points() if t[2] not in _tried(data, *t[:2])]
        tuned = pool.map(run, [(t[3], TUNING_SEED, "validation", 1) for t in trials])
        for (grid, name, attack, _), result in zip(trials, tuned, strict=True):
            _tried(data, grid, name)[attack] = late_accuracy(result)
            keep(f"{name}, {attack}", result)
        wanted = cells(seeds, recommended(data["tuning"]))
        missing = [c for c in wanted if c[2] not in [r["seed"] for r in _kept(data, *c[:2])]]
        jobs = [(point(defence, attack), seed, "test", 1) for defence, attack, seed in missing]
        for (defence, attack, seed), result in zip(missing, pool.map(run, jobs), strict=True):
            _kept(data, defence, attack).extend(plain([result]))
            keep(f"{defence}, {attack}, seed {seed}", result)


def cells(seeds: Sequence[int], rule: str) -> Iterator[tuple[str, str, int]]:
    """Every run as (defence, attack, seed), seed by seed."""
    for seed, attack, defence in itertools.product(seeds, ATTACKS, (NONE, rule)):
        yield defence, attack, seed


def _tried(data: dict[str, Any], grid: str, name: str) -> dict[str, float]:
    found: dict[str, float] = data["tuning"].setdefault(grid, {}).setdefault(name, {})
    return found


def _kept(data: dict[str, Any], defence: str, attack: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = data["runs"].setdefault(defence, {}).setdefault(attack, [])
    return found


# --- the page ---------------------------------------------------------------------------------------


def _rows(found: Found) -> Iterator[list[str]]:
    for attack in ATTACKS:
        yield [attack, *(mean(late_accuracy(r) for r in found[d].get(attack, ())) for d in found)]


def _losses(found: Found) -> Iterator[list[str]]:
    for attack in ATTACKS:
        yield [attack, *(mean(lost(found, d, attack)) for d in found)]


def _tuning(tuning: Tuning) -> Iterator[list[str]]:
    for points in tuning.values():
        for name, found in points.items():
            yield [name, ", ".join(f"{attack} {accuracy:.1f}" for attack, accuracy in found.items())]


def picture(found: Found) -> str:
    """The points lost without a defence and with the recommended one, as bars: an SVG file of its own."""
    compared = tuple(found)
    parts, top = legend([(d, i) for i, d in enumerate(compared)], above=6.0)
    pairs = [(a, d) for a in ATTACKS for d in compared if lost(found, d, a)]
    losses = {(a, d): statistics.fmean(lost(found, d, a)) for a, d in pairs}
    start, row = 96.0, 14.0 * len(compared) + 6.0
    unit = (WIDTH - start - 46.0) / max(1.0, *losses.values())
    for n, attack in enumerate(ATTACKS):
        y = top + n * row
        parts.append(text(start - 6, y + 18, attack, "tick end"))
        for i, defence in enumerate(d for d in compared if (attack, d) in losses):
            points = losses[attack, defence]
            length = unit * max(points, 0.0)
            parts.append(rect(start, y + 14 * i, length, 12.0, i, f"{attack}, {defence}: {points:.1f}"))
            parts.append(text(start + length + 5, y + 10.5 + 14 * i, f"{points:.1f}", "tick"))
    return standalone(svg(parts, top + row * len(ATTACKS), "points of accuracy lost, by attack"))


def goals(found: Found, rule: str) -> list[str]:
    """The goals, and whether they were reached."""
    losses = {d: {a: statistics.fmean(lost(found, d, a)) for a in ATTACKS} for d in found}
    missed = [a for a in ATTACKS if a != NOBODY and losses[rule][a] > GOAL_LOST]
    bitten = [a for a in ATTACKS if a != NOBODY and losses[NONE][a] >= GOAL_TEETH]
    return [
        f"At most {GOAL_LOST:g} points lost with the recommended table: "
        + ("reached for every attack." if not missed else f"**missed** for {', '.join(missed)}."),
        f"{GOAL_TEETH:g} points or more lost without a defence, for at least {TOOTHED} attacks: "
        + ("reached" if len(bitten) >= TOOTHED else "**missed**")
        + f" ({', '.join(bitten) or 'none'}).",
    ]


def document(found: Found, tuning: Tuning, minutes: float) -> str:
    """The page."""
    fleet, client, rule = BASE["fleet"], BASE["client"], recommended(tuning)
    settings = ", ".join(f"{k} = {json.dumps(v)}" for k, v in DEFENCES[rule].items())
    seeds = [r.seed for r in found[NONE][NOBODY]]
    listed = "\n".join(f"- {goal}" for goal in goals(found, rule))
    return f"""# Study: hostile devices

Made by `python -m benchmarks.study_attacks`; do not edit. This run took {minutes:.0f} minutes on
{os.cpu_count()} cores.

Fashion-MNIST, a CNN of 99,806 parameters, {fleet["clients"]} devices with at most
{fleet["examples_per_client"]} images each (Dirichlet {fleet["dirichlet_alpha"]:g}), slowest/fastest =
{fleet["speed_ratio"]:g}; {client["epochs"]} local epochs, batch {client["batch_size"]}, learning rate
{client["learning_rate"]:g}; FedBuff with K = {BASE["strategy"]["buffer_size"]},
{BASE["server"]["concurrency"]} devices at a time, {HORIZON_S:g} virtual seconds. With an attack
{ATTACKERS:.0%} of the devices are hostile ([what they send](../robust.md#attacks)). Seeds
{", ".join(map(str, seeds))}, paired. Mean ± standard deviation.

Recommended: `[robust] {settings}`.

{listed}

![points of accuracy lost, by attack]({NAME}.svg)

## Accuracy over the last fifth of the run, %

{table(("attack", *found), _rows(found))}

## Points lost against nobody attacking and no defence

{table(("attack", *found), _losses(found))}

## Tuning

On seed {TUNING_SEED}, measured on the validation part: {len(LEARNING_RATES)} learning rates for the plain
mean when nobody attacks, then {len(RULES)} rules at {client["learning_rate"]:g} under
{", ".join(TUNED_UNDER)}; the one whose worst case was best is recommended. All with the same clip, share
and quarantine.

{table(("point", "accuracy over the last fifth, %"), _tuning(tuning))}
"""


def main() -> None:
    """Measure, write."""
    parser = study_parser(__doc__, "one seed, a short horizon, docs untouched")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at a time")
    arguments = parser.parse_args()
    folder = Path("/tmp") if arguments.quick else STUDIES
    data_file = folder / f"{NAME}.json"
    if arguments.quick:
        BASE["run"]["virtual_s_max"] = 12.0
        data_file.unlink(missing_ok=True)
    if not arguments.render:
        measure(data_file, SEEDS[:1] if arguments.quick else SEEDS, arguments.workers)
    data = json.loads(data_file.read_text(encoding="utf-8"))
    runs = data["runs"]
    found = {
        d: {a: [Result.from_json(r) for r in runs[d].get(a, ())] for a in ATTACKS}
        for d in DEFENCES
        if d in runs
    }
    (folder / f"{NAME}.svg").write_text(picture(found), encoding="utf-8")
    page = document(found, data["tuning"], data["minutes"])
    publish(folder / f"{NAME}.md", page, __file__)


if __name__ == "__main__":
    main()
