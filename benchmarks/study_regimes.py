"""When sub-models pay: the same strategy on parts of the model and on whole ones, regime by regime.

    python -m benchmarks.study_regimes run [--regime '*/memory/*'] [--minutes 25]
    python -m benchmarks.study_regimes page        # docs/studies/regimes.md, of what was run

A regime is what bounds the devices (their processors, narrow links, or memory: the slower half cannot hold
more than half of the units), how large the model is, and how the data lie. Each row is tuned by the arena's
machine (`benchmarks/arena/tuning.py`), by a budget that is the same for all. What has ended stays in
`benchmarks/regimes/`.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from anabranch.workloads.digits import Digits
from benchmarks.arena.cells import DEVICES, Cell
from benchmarks.arena.intervals import Interval, bootstrap, paired
from benchmarks.arena.page import chain_of
from benchmarks.arena.play import Match, play, tell
from benchmarks.arena.rows import RAW, SPARSE, Row
from benchmarks.arena.standings import BELOW, lead, reached
from benchmarks.arena.store import Record, Store
from benchmarks.arena.tables import tuned_to
from benchmarks.arena.tuning import SEEDS, Axis, Grid
from benchmarks.studies import STUDIES, Point, Tables, one_thread, publish, table

RESULTS = Path(__file__).with_name("regimes")
PAGE = STUDIES / "regimes.md"
SPEED_LEVELS = 8
GOAL = 1.25  # times sooner

PROCESSOR, LINK, MEMORY, SPARSE_LINK = "processor", "link", "memory", "sparse-link"
HIDDEN = {"small": 64, "large": 256}  # units; 4,810 and 19,210 parameters
SPLITS: Mapping[str, Tables] = {
    "dirichlet-0.3": {"fleet": {"split": "dirichlet", "dirichlet_alpha": 0.3}},
    "speed-shards": {"fleet": {"split": "speed-shards", "shards_per_client": 2}},
}


class Large(Digits):
    """The perceptron of the digits with 256 hidden units: 64-256-10."""

    name = "digits-large"

    def model(self) -> Any:
        """A `torch.nn.Sequential`."""
        from torch import nn

        return nn.Sequential(nn.Linear(64, HIDDEN["large"]), nn.ReLU(), nn.Linear(HIDDEN["large"], 10))


@dataclass(frozen=True, order=True)
class Regime(Cell):
    """A cell with another size of model: `links` says what bounds the devices, `workload` the size."""

    @property
    def tables(self) -> tuple[Tables, ...]:
        """Of every row; the slowest device's step of a whole model takes 0.5 s."""
        # By which a whole model takes about as long on its way up as its training.
        mbps = 0.05 * HIDDEN[self.workload] / HIDDEN["small"]
        bound: dict[str, Any] = {}
        if self.links in (LINK, SPARSE_LINK):
            bound = {"up_mbps": mbps, "down_mbps": 5 * mbps}
        elif self.links == MEMORY:
            # The slower half's; a run of whole models lets none of them in.
            bound = {"widths_max": [1.0, 0.5]}
        base: Tables = {
            "run": {
                "name": "regimes",
                "workload": "digits" if self.workload == "small" else "benchmarks.study_regimes:Large",
                "evaluate_every_versions": 0,
                "keep_payloads": False,
            },
            "client": {"steps": 10, "batch_size": 10},
            "fleet": {
                "clients": DEVICES,
                "speed": "levels",
                "speed_levels": SPEED_LEVELS,
                "speed_ratio": 5.0,
                "step_time_s": 0.1,
                "waiting": "called",
                **bound,
            },
        }
        return base, SPLITS[self.split]


BOUNDS = (PROCESSOR, LINK, SPARSE_LINK, MEMORY)
REGIMES = [Regime(*each, "steady") for each in itertools.product(HIDDEN, SPLITS, BOUNDS)]
GRID = Grid(
    (
        Axis("client.learning_rate", (0.2, 0.4, 0.8)),
        Axis("strategy.buffer_size", (5, 10), least=1, most=80, whole=True),
    )
)
WHOLE, AWAY = "whole models", "whole models, the slower half away"
PLANS: Mapping[str, Tables] = {
    WHOLE: {},
    "random, a quarter left out": {"submodel": {"name": "random", "drop": 0.25}},
    "random, half left out": {"submodel": {"name": "random", "drop": 0.5}},
    "first units by speed": {"submodel": {"name": "heterofl"}},
    "first half of the units": {"submodel": {"name": "heterofl", "widths": [0.5]}},
    AWAY: {},
}
FITTING = (AWAY, "random, half left out", "first half of the units")  # what devices of little memory can do
FREE = (WHOLE, "random, a quarter left out", "random, half left out", "first units by speed")


@dataclass(frozen=True)
class Plan(Row):
    """FedBuff with a way to choose parts."""

    def point(self, cell: Cell, setting: tuple[float, ...], share: float = 1.0) -> Point:
        """A run of it in a regime."""
        point = super().point(cell, setting, share)
        return replace(point, layers=(*point.layers, PLANS[self.strategy]))


def rows(regime: Regime) -> list[Plan]:
    """Whole models first: what the others are set beside."""
    names = FITTING if regime.links == MEMORY else FREE
    chain = SPARSE if regime.links == SPARSE_LINK else RAW
    return [Plan(name, chain, GRID, {"name": "fedbuff"}) for name in names]


def todo(pattern: str = "*") -> list[Match]:
    """Every row of every regime."""
    found = [regime for regime in REGIMES if fnmatch(regime.name, pattern)]
    return [Match(r, row, Store.of(r.name, RESULTS)) for r in found for row in rows(r)]


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--regime", default="*", help="a pattern, such as 'small/*/link/*'")
    parser.add_argument("--minutes", type=float, default=25.0, help="no run begins later")
    arguments = parser.parse_args()
    if arguments.what == "page":
        publish(PAGE, text(todo()), __file__)
        return
    one_thread()
    if play(todo(arguments.regime), 60 * arguments.minutes, tell):
        print("everything that was asked for has been run")


# --- the page ----------------------------------------------------------------------------------


def text(found: Sequence[Match]) -> str:
    """The page of what has ended of these."""
    ended: dict[str, list[tuple[Match, list[Record]]]] = {}
    for match in found:
        if finals := match.finals:
            ended.setdefault(match.cell.name, []).append((match, finals))
    tables = [_regime(name, of) for name, of in ended.items() if len(of) > 1]
    return "\n\n".join((_head(), _map(ended), *tables)) + "\n"


def _head() -> str:
    small, large = (f"{size} hidden units" for size in HIDDEN.values())
    return f"""# When sub-models pay

Made by `python -m benchmarks.study_regimes page` of what `python -m benchmarks.study_regimes run` has left in
`benchmarks/regimes`; do not edit.

FedBuff, {DEVICES} devices, the digits, perceptrons of {small} (`small`) and {large} (`large`), 200 virtual
seconds; tasks, seeds, tuning and intervals are [the arena's](arena.md), but that a row has six points to
begin with: three learning rates by two sizes of the buffer. A step of a part takes its share of the whole
model's operations, which is the best that can be hoped for. Whole values travel, but for `{SPARSE_LINK}`.
`{PROCESSOR}`: links are fast, the slowest device five times slower than the fastest. `{LINK}`: a whole
model's way up takes about as long as its training. `{SPARSE_LINK}`: the same links, and updates by
`{chain_of("uplink")}`, versions by
`{chain_of("downlink")}`. `{MEMORY}`: the slower half of the devices can hold half of the units and no more;
with whole models they stay away, else everybody trains half."""


def _map(ended: Mapping[str, Sequence[tuple[Match, list[Record]]]]) -> str:
    lines = []
    for name, of in ended.items():
        reference = of[0][1]
        best = max(of[1:], key=lambda each: _sooner(each[1], reference).mean, default=None)
        if best is not None:
            lines.append([name, best[0].row.strategy, *_against(best[1], reference)])
    return f"""## The map

Beside whole models, in each regime the way to choose parts that is soonest at their accuracy less
{BELOW:g} point. How many times sooner is the geometric mean over the seeds; a run that never is there counts
as being there at its end. The goal was {GOAL:g}.

{table(("", "parts", "times sooner", "bytes both ways, of theirs", "accuracy, less theirs"), lines)}"""


def _regime(name: str, of: Sequence[tuple[Match, list[Record]]]) -> str:
    reference = of[0][1]
    lines = [
        [
            match.row.strategy,
            _mean([r.accuracy for r in finals]),
            *(_against(finals, reference) if finals is not reference else ("", "", "")),
            _mean([_seconds(r, _target(reference)) for r in finals]),
            _mean([float(r.updates) for r in finals], 0),
            _mean([r.worst_tenth or 0.0 for r in finals]),
            tuned_to(match, finals),
        ]
        for match, finals in of
    ]
    to = f"{_target(reference):.1f} %"
    head = ("", "accuracy, %", "times sooner", "bytes both ways, of theirs", "accuracy, less theirs")
    more = (f"seconds to {to}", "updates", "worst tenth, %", "tuned to")
    return f"## {name.removesuffix('/steady')}\n\n{table((*head, *more), lines)}"


def _target(reference: Sequence[Record]) -> float:
    return sum(r.accuracy for r in reference) / len(reference) - BELOW


def _seconds(record: Record, target: float) -> float:
    at = reached(record, target)
    return record.curve[-1][0] if at is None else at[0]


def _bytes(record: Record, target: float) -> float:
    at = reached(record, target)
    return record.up_mb + record.down_mb if at is None else at[1] + at[2]


def _sooner(mine: Sequence[Record], reference: Sequence[Record]) -> Interval:
    """How many times, by the geometric mean."""
    target = _target(reference)
    logs = [{r.seed: math.log(_seconds(r, target)) for r in of} for of in (reference, mine)]
    found = bootstrap(paired(*logs))
    return Interval(*(math.exp(value) for value in (found.mean, found.low, found.high)))


def _against(mine: Sequence[Record], reference: Sequence[Record]) -> tuple[str, str, str]:
    sooner, target = _sooner(mine, reference), _target(reference)
    there = sum(reached(r, target) is not None for r in mine)
    some = "" if there == len(SEEDS) else f", {there} of {len(SEEDS)} there"
    logs = [{r.seed: math.log(_bytes(r, target)) for r in of} for of in (mine, reference)]
    took = bootstrap(paired(*logs))
    points = lead(mine, reference)
    said = f"{sooner.mean:.2f} ({sooner.low:.2f} to {sooner.high:.2f}{some})"
    return (
        f"**{said}**" if sooner.low > 1 or sooner.high < 1 else said,
        f"{math.exp(took.mean):.2f} ({math.exp(took.low):.2f} to {math.exp(took.high):.2f})",
        f"{points.mean:+.1f} ({points.low:+.1f} to {points.high:+.1f})",
    )


def _mean(values: Sequence[float], digits: int = 1) -> str:
    return f"{sum(values) / len(values):.{digits}f}"


if __name__ == "__main__":
    main()
