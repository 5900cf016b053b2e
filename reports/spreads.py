"""Several runs beside each other: one row per strategy and workload, spread over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anabranch.reports.page import flat
from anabranch.reports.result import Kind, Point, Result

# Settings that runs of one group may differ in without being different experiments.
_FREE = {"run.seed", "run.name"}


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (0 of one value), least and greatest of `count` values."""

    mean: float
    deviation: float
    least: float
    greatest: float
    count: int


@dataclass(frozen=True)
class Row:
    """The runs of one strategy on one workload. A spread is None where no run has the figure.

    `reached` counts the runs that reached the target: `time_to_target_s` and the bytes to the target are
    over those alone. `differing` names the settings that vary within the row besides the seed:
    its spread then is not one over seeds only.
    """

    workload: str
    kind: Kind
    strategy: str
    seeds: tuple[int, ...]
    target_accuracy: float | None
    reached: int
    time_to_target_s: Spread | None
    bytes_to_target: Spread | None
    uplink_to_target: Spread | None
    downlink_to_target: Spread | None
    final_accuracy: Spread | None
    best_accuracy: Spread | None
    updates_applied: Spread
    versions: Spread
    staleness_mean: Spread
    uplink_bytes: Spread
    downlink_bytes: Spread
    wall_s: Spread
    differing: tuple[str, ...]


def compare(results: Iterable[Result]) -> list[Row]:
    """A row per workload, kind and strategy, in the order in which each first appears."""
    return [_row(runs) for by_strategy in grouped(results).values() for runs in by_strategy.values()]


def grouped(results: Iterable[Result]) -> dict[tuple[str, Kind], dict[str, list[Result]]]:
    """Results by (workload, kind), then by strategy."""
    groups: dict[tuple[str, Kind], dict[str, list[Result]]] = {}
    for r in results:
        groups.setdefault((r.workload, r.kind), {}).setdefault(r.strategy, []).append(r)
    return groups


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return Spread(statistics.fmean(values), deviation, min(values), max(values), len(values))


def _spread_of_known(values: Iterable[float | None]) -> Spread | None:
    known = [float(v) for v in values if v is not None]
    return spread(known) if known else None


def _row(runs: Sequence[Result]) -> Row:
    first = runs[0]
    targets = {r.target_accuracy for r in runs}
    reached = [p for r in runs if r.time_to_target_s is not None and (p := _reaching(r)) is not None]
    return Row(
        workload=first.workload,
        kind=first.kind,
        strategy=first.strategy,
        seeds=tuple(r.seed for r in runs),
        target_accuracy=targets.pop() if len(targets) == 1 else None,
        reached=sum(r.time_to_target_s is not None for r in runs),
        time_to_target_s=_spread_of_known(r.time_to_target_s for r in runs),
        bytes_to_target=_spread_of_known(r.bytes_to_target for r in runs),
        uplink_to_target=_spread_of_known(p.uplink_bytes for p in reached),
        downlink_to_target=_spread_of_known(p.downlink_bytes for p in reached),
        final_accuracy=_spread_of_known(r.final_accuracy for r in runs),
        best_accuracy=_spread_of_known(r.best_accuracy for r in runs),
        updates_applied=spread([r.updates_applied for r in runs]),
        versions=spread([r.versions for r in runs]),
        staleness_mean=spread([r.staleness.mean for r in runs]),
        uplink_bytes=spread([r.uplink_bytes for r in runs]),
        downlink_bytes=spread([r.downlink_bytes for r in runs]),
        wall_s=spread([r.wall_s for r in runs]),
        differing=_differing(runs),
    )


def _reaching(r: Result) -> Point | None:
    """The first evaluation at the target."""
    return next((p for p in r.history if p.accuracy >= r.target_accuracy), None)


def _differing(runs: Sequence[Result]) -> tuple[str, ...]:
    configs = [flat(r.config) for r in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    return tuple(k for k in keys if k not in _FREE and any(c.get(k) != configs[0].get(k) for c in configs))
