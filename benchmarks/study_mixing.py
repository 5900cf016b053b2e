"""What a rule costs when nobody attacks, and what attacks cost that hide among the honest updates.

    python -m benchmarks.study_mixing [--quick | --render] [--workers N]

The fleet of `study_attacks`, with an MLP: neighbour mixing against the rules that were recommended there,
under the attacks that hide (ALIE, min-max) and the one that pulls (IPM). Tuning is on a seed that the study
does not use: the learning rate for the plain mean when nobody attacks, then each rule at that rate, with two
assumed shares of attackers where it has one (`momentum`: of what devices sent last), of which the one with
the best worst case under `TUNED_UNDER` is taken. `COMPARED` goes on to paired seeds: under the attack that
searches against the rule and with a backdoor, too, of which the success is measured. Writes
`docs/studies/mixing.md` and `.json`; what is in the `.json` is not run again.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from anabranch.reports.intervals import mean_interval
from anabranch.reports.result import Result
from benchmarks.studies import STUDIES, Point, late_accuracy, mean, pool_of, publish, run, study_parser, table
from benchmarks.study_attacks import ATTACKERS, BASE, GOAL_LOST, NOBODY, SHARED

NAME = "mixing"
SEEDS, TUNING_SEED = (21, 22, 23, 24, 25), 101
RATES = (0.05, 0.1, 0.2, 0.4)
TUNED_UNDER = (NOBODY, "alie", "min_max", "ipm")
ADAPTIVE, BACKDOOR, SUCCESS = "adaptive", "backdoor", "success of backdoor"
ATTACKS = (*TUNED_UNDER, ADAPTIVE, BACKDOOR)
NONE, MIXING, CLIPPING, MOMENTUM = "none", "neighbour_mixing", "centred_clipping", "momentum"
SHARES = {
    NONE: (0.0,),
    "geometric_median": (0.0,),
    "multi_krum": (0.3, 0.4),
    MIXING: (0.3, 0.4),
    CLIPPING: (0.0,),
    MOMENTUM: (0.5, 0.9),  # before centred clipping: a share of what a device sent last
}
TRIED = {CLIPPING: (NOBODY, "alie"), MOMENTUM: (NOBODY, "alie")}  # in tuning alone, and no more
# What goes on to the paired seeds: the goals' cells first, and what costs little beside them.
COMPARED = {
    NONE: (NOBODY, ADAPTIVE, BACKDOOR),
    MIXING: ATTACKS,
    "multi_krum": (NOBODY, "alie"),
}
GOAL_PRICE = 1.0
WORKLOAD = f"{Path(__file__).parent / 'fashion_mlp.py'}:FashionMlp"

Key = tuple[str, float, str, float, int, str]  # rule, share, attack, rate, seed, part


def point(rule: str, share: float, attack: str, rate: float) -> Point:
    """One cell."""
    robust: dict[str, Any] = {} if rule == NONE else {"rule": rule, **SHARED}
    uplink: dict[str, Any] = {}
    if rule == MOMENTUM:
        robust["rule"], uplink, share = CLIPPING, {"codec": f"momentum({share:g})"}, 0.0
    hostile = {} if attack == NOBODY else {"attackers": ATTACKERS, "attack": attack}
    tables: dict[str, dict[str, Any]] = {
        "run": {"workload": WORKLOAD},
        "fleet": hostile,
        "robust": robust | ({"attackers": share} if share else {}),
        "uplink": uplink,
        "client": {"learning_rate": rate},
    }
    return Point(f"{rule} {share:g}, {attack}", (BASE, tables), {})


class Runs:
    """What was measured, late accuracy in %, kept in a file as it comes."""

    def __init__(self, file: Path, workers: int) -> None:
        self._file, self._workers = file, workers
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
        self.found: dict[Key, float] = {tuple(words): accuracy for *words, accuracy in kept}

    def measure(self, wanted: Sequence[Key]) -> None:
        """Run what is not there yet."""
        missing = [key for key in wanted if key not in self.found]
        with pool_of(workers=self._workers) as pool:
            jobs = [(point(*key[:4]), key[4], key[5], 1) for key in missing]
            for key, result in zip(missing, pool.map(run, jobs), strict=True):
                self.found[key] = late_accuracy(result)
                if key[2] == BACKDOOR:
                    self.found[*key[:2], SUCCESS, *key[3:]] = late_success(result)
                lines = (json.dumps([*words, accuracy]) for words, accuracy in self.found.items())
                self._file.write_text("[" + ",\n".join(lines) + "]\n", encoding="utf-8")
                print(f"{key}: {self.found[key]:.1f}", flush=True)

    def rate(self) -> float:
        """The best for the plain mean when nobody attacks."""
        return max(RATES, key=lambda rate: self.found[tuning(NONE, 0.0, NOBODY, rate)])

    def share(self, rule: str) -> float:
        """The one whose worst case in tuning is the best."""
        return max(SHARES[rule], key=lambda share: min(self.tuned(rule, share)))

    def tuned(self, rule: str, share: float) -> list[float]:
        """By attack."""
        return [self.found[tuning(rule, share, attack, self.rate())] for attack in tuned_under(rule)]

    def of(self, rule: str, attack: str) -> list[float]:
        """By paired seed."""
        words = rule, self.share(rule), attack, self.rate()
        return [self.found[*words, seed, "test"] for seed in SEEDS if (*words, seed, "test") in self.found]

    def lost(self, rule: str, attack: str) -> list[float]:
        """Points that each seed lost against itself without attackers and without a rule."""
        return [a - b for a, b in zip(self.of(NONE, NOBODY), self.of(rule, attack), strict=False)]


def tuned_under(rule: str) -> tuple[str, ...]:
    """The attacks that a rule is tuned under."""
    return TRIED.get(rule, TUNED_UNDER)


def late_success(result: Result) -> float:
    """Of marked images of other classes, those that are taken for the mark's, in %; as `late_accuracy`."""
    end_s = result.history[-1].time_s
    late = [point for point in result.history if point.time_s >= 0.8 * end_s]
    return statistics.fmean(100 * (point.metrics["attack_success"] or 0.0) for point in late)


def tuning(rule: str, share: float, attack: str, rate: float) -> Key:
    """A run of tuning."""
    return rule, share, attack, rate, TUNING_SEED, "validation"


def measure(runs: Runs, seeds: Sequence[int]) -> None:
    """Tune, then every rule on every seed."""
    runs.measure([tuning(NONE, 0.0, NOBODY, rate) for rate in RATES])
    rate = runs.rate()
    grid = [(rule, share) for rule, shares in SHARES.items() for share in shares]
    runs.measure([tuning(rule, share, attack, rate) for rule, share in grid for attack in tuned_under(rule)])
    found = [(rule, attack) for attack in ATTACKS for rule, attacks in COMPARED.items() if attack in attacks]
    cells = [(rule, runs.share(rule), attack, rate) for rule, attack in found]
    runs.measure([(*cell, seed, "test") for cell in cells for seed in seeds])


def interval(values: Sequence[float]) -> str:
    """Mean, and the 95 % interval of paired differences."""
    between = mean_interval(values) if len(values) == len(SEEDS) else None
    if between is None:
        return mean(values)
    return f"{statistics.fmean(values):+.1f} ({between[0]:+.1f} to {between[1]:+.1f})"


def document(runs: Runs) -> str:
    """The page."""
    rows = (
        [rule, *(mean(runs.of(rule, a)) if a in of else "" for a in ATTACKS)] for rule, of in COMPARED.items()
    )
    losses = (
        [
            rule,
            *(
                interval(runs.lost(rule, a)) if a in of and (rule, a) != (NONE, NOBODY) else ""
                for a in ATTACKS
            ),
        ]
        for rule, of in COMPARED.items()
    )
    price, alie = (statistics.fmean(runs.lost(MIXING, attack)) for attack in (NOBODY, "alie"))
    fleet, client = BASE["fleet"], BASE["client"]
    return f"""# Study: attacks that hide

Made by `python -m benchmarks.study_mixing`; do not edit.

The fleet of [hostile devices](attacks.md), with an MLP of 25,450 parameters:
Fashion-MNIST, {fleet["clients"]} devices with at most {fleet["examples_per_client"]} images each
(Dirichlet {fleet["dirichlet_alpha"]:g}), slowest/fastest = {fleet["speed_ratio"]:g},
{client["epochs"]} local epochs, FedBuff with K = {BASE["strategy"]["buffer_size"]},
{BASE["run"]["virtual_s_max"]:g} virtual seconds, {ATTACKERS:.0%} of the devices hostile.
All rules with the same clip, share and quarantine. Seeds {", ".join(map(str, SEEDS))}, paired.

- At most {GOAL_PRICE:g} point lost by `neighbour_mixing` when nobody attacks: {_said(price, GOAL_PRICE)}.
- At most {GOAL_LOST:g} points lost under ALIE: {_said(alie, GOAL_LOST)}.

## Accuracy over the last fifth of the run, %

{table(("rule", *ATTACKS), rows)}

The backdoor is a mark on half of the images of a hostile device, with the label 0. Of the test images of
other classes, with that mark, the share that is taken for it, %, over the same fifth: {_successes(runs)}.

## Points lost against nobody attacking and no rule, 95 % interval

{table(("rule", *ATTACKS), losses)}

## Tuning

On the validation part of seed {TUNING_SEED}: the learning rate for the plain mean when nobody attacks, then
every rule at the best one.

{table(("point", "accuracy over the last fifth, %"), _tuned(runs))}
"""


def _successes(runs: Runs) -> str:
    found = [(rule, runs.of(rule, SUCCESS)) for rule, attacks in COMPARED.items() if BACKDOOR in attacks]
    return ", ".join(f"{rule} {mean(of)}" for rule, of in found)


def _said(lost: float, goal: float) -> str:
    return f"{'reached' if lost <= goal else '**missed**'} ({lost:.1f})"


def _tuned(runs: Runs) -> Iterator[list[str]]:
    for rate in RATES:
        yield [f"learning_rate = {rate:g}", f"nobody {runs.found[tuning(NONE, 0.0, NOBODY, rate)]:.1f}"]
    for rule, shares in SHARES.items():
        for share in shares:
            kind = "share" if rule == MOMENTUM else "attackers"
            named = f"{rule}, {kind} = {share:g}" if share else rule
            found = zip(tuned_under(rule), runs.tuned(rule, share), strict=True)
            yield [named, ", ".join(f"{attack} {accuracy:.1f}" for attack, accuracy in found)]


def main() -> None:
    """Measure, write."""
    parser = study_parser(__doc__, "one seed, a short horizon, docs untouched")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at a time")
    arguments = parser.parse_args()
    folder = Path("/tmp") if arguments.quick else STUDIES
    if arguments.quick:
        BASE["run"]["virtual_s_max"] = 12.0
        (folder / f"{NAME}.json").unlink(missing_ok=True)
    runs = Runs(folder / f"{NAME}.json", arguments.workers)
    if not arguments.render:
        measure(runs, SEEDS[:1] if arguments.quick else SEEDS)
    publish(folder / f"{NAME}.md", document(runs), __file__)


if __name__ == "__main__":
    main()
