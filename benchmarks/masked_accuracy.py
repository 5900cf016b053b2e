"""What whole numbers under masks cost in accuracy: rings of 32 and 16 bits against the same run in the clear.

    python -m benchmarks.masked_accuracy [--quick]

40 unequal devices learn the digits, FedBuff with buffers of 10 and 150 versions, on paired seeds. Keepers
answer at once here, so that a masked run has the same updates in the same versions, of the same staleness, as
the plain one: that is looked at, and said. What is left are the cut, the rounding, and weights that are whole
numbers. Accuracy is the mean of a run's last fifth; the interval is Student's, 95 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.effects import Decided, Effect, Published
from anabranch.reports.intervals import mean_interval
from anabranch.simulation.run import open_simulation
from benchmarks.studies import Tables, late_accuracy, mean, pool_of, table

SEEDS = (1, 2, 3, 4, 5)
CLIP = 0.5  # training gives none much longer here
BASE: Tables = {
    "run": {"workload": "digits", "versions_max": 150, "evaluate_every_versions": 2, "keep_payloads": False},
    "fleet": {"clients": 40, "speed": "lognormal"},  # no two come at one moment
    "client": {"learning_rate": 0.3},
    "strategy": {"name": "fedbuff", "buffer_size": 10},
    "robust": {"buffer_max": 1},  # as under masks: a device is once in a sum
}
MASKED: dict[str, Any] = {"mode": "keeper", "keepers": ["north"], "clip": CLIP}
ARMS: dict[str, dict[str, Any]] = {
    "in the clear": {},
    "ring of 32 bits": MASKED,
    "ring of 16 bits": {**MASKED, "bits": 16, "value_bits": 9, "levels": 8},
}


@dataclass(frozen=True)
class Run:
    """`who`: the updates of each version, and the staleness of all."""

    accuracy: float
    who: tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]


class Listener:
    """Hears which updates make which version."""

    def __init__(self) -> None:
        self.versions: list[tuple[str, ...]] = []
        self.staleness: list[int] = []

    def observe(self, _: ev.Event, effects: Sequence[Effect]) -> None:
        """An event was handled."""
        for effect in effects:
            if isinstance(effect, Published):
                self.versions.append(tuple(sorted(effect.update_ids)))
            elif isinstance(effect, Decided):
                self.staleness.append(effect.receipt.decision.staleness)


def config_of(arm: str, seed: int, versions: int) -> Config:
    """One run."""
    secagg = {"secagg": ARMS[arm]} if ARMS[arm] else {}
    return merge([("base", BASE), ("arm", {**secagg, "run": {"seed": seed, "versions_max": versions}})])


def run(job: tuple[str, int, int]) -> Run:
    """In a worker."""
    began, ears = time.perf_counter(), Listener()
    with open_simulation(config_of(*job)) as simulation:
        if simulation.keepers is not None:
            simulation.keepers.answer_s = 0.0
        simulation.world.observers.append(ears.observe)
        simulation.run()
        result = simulation.result(time.perf_counter() - began)
    return Run(late_accuracy(result), (tuple(ears.versions), tuple(ears.staleness)))


def rows_of(runs: dict[str, list[Run]]) -> list[list[str]]:
    """Of each way: accuracy, what it is less than in the clear, and whether the pairs are pairs."""
    plain, rows = runs["in the clear"], []
    for arm, found in runs.items():
        apart = [one.accuracy - other.accuracy for one, other in zip(found, plain, strict=True)]
        same = sum(one.who == other.who for one, other in zip(found, plain, strict=True))
        low, high = mean_interval(apart) or (0.0, 0.0)
        rows.append([
            arm,
            mean((one.accuracy for one in found), 2),
            f"{statistics.fmean(apart):+.2f} ({low:+.2f} to {high:+.2f})" if arm != "in the clear" else "",
            ", ".join(f"{value:+.2f}" for value in apart) if arm != "in the clear" else "",
            f"{same} of {len(found)}",
        ])  # fmt: skip
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two seeds, 30 versions")
    quick = parser.parse_args().quick
    seeds, versions = (SEEDS[:2], 30) if quick else (SEEDS, 150)
    jobs = [(arm, seed, versions) for arm in ARMS for seed in seeds]
    with pool_of() as pool:
        found = list(pool.map(run, jobs))
    runs = {arm: found[i * len(seeds) : (i + 1) * len(seeds)] for i, arm in enumerate(ARMS)}
    head = "updates travel", "accuracy, %", "points less in the clear", "seed by seed", "same updates"
    print(table(head, rows_of(runs)))


if __name__ == "__main__":
    main()
