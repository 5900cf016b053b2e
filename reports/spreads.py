"""Several runs beside each other: one row for the runs that differ in nothing but the seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from anabranch.core.model.chains import AUTO
from anabranch.core.model.metrics import ACCURACY
from anabranch.core.parts import is_code
from anabranch.reports.intervals import deviation, mean
from anabranch.reports.metrics import lacking, last_value, metric_names
from anabranch.reports.result import FLOWER, Fairness, Kind, Point, Result
from anabranch.reports.settings import PLACES, SEED, differing, label_text, settings, shared_names
from anabranch.reports.text import NOTHING

DIGITS = 8  # of a digest, to tell code by


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (0 of one value), least and greatest of `count` values."""

    mean: float
    deviation: float
    least: float
    greatest: float
    count: int


@dataclass(frozen=True)
class SpreadRow:
    """The runs of a workload that differ in nothing but the seed. A spread is None where none has the figure.

    `settings` are those in which the rows of this workload differ, and `label` is the strategy with them.
    Runs of other code are rows of their own, where that is known: `settings` then has `code of PLACE`, the
    beginning of a digest.
    `reached` counts the runs that reached the target: `time_to_target_s` and the bytes to the target are
    over those alone. `metrics` are the last values of what else the App measures, its loss among them;
    `not_finite` counts the measurements that lack a figure which others have. The runs are judged by
    `metric`, `mode` and `target`, and came to `final_value` and `best_value`; `aimed` counts those that had a
    target. `worst_tenths` and `deviations` are of `Fairness`, by metric and by what it is over, as `over` has
    them: `mae over groups`.
    """

    workload: str
    kind: Kind
    strategy: str
    label: str
    settings: Mapping[str, Any]
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
    metrics: Mapping[str, Spread]
    not_finite: int
    metric: str
    mode: str
    target: float | None
    aimed: int
    final_value: Spread | None
    best_value: Spread | None
    worst_tenths: Mapping[str, Spread]
    deviations: Mapping[str, Spread]


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in nothing but the seed, of the same code as far as it is known.

    See `SpreadRow` for `label` and `settings`.
    """

    strategy: str
    label: str
    settings: Mapping[str, Any]
    runs: Sequence[Result]


def compare(results: Iterable[Result]) -> list[SpreadRow]:
    """A row for each group, in the order in which each first appears."""
    return [_row(group) for groups in grouped(results).values() for group in groups]


def grouped(results: Iterable[Result]) -> dict[tuple[str, Kind], list[RunGroup]]:
    """Results by (workload, kind), then by all settings but the seed."""
    by_workload: dict[tuple[str, Kind], list[Result]] = {}
    for r in results:
        by_workload.setdefault((r.workload, r.kind), []).append(r)
    return {key: _groups(runs) for key, runs in by_workload.items()}


def _groups(runs: Sequence[Result]) -> list[RunGroup]:
    found: dict[str, list[list[Result]]] = {}
    for r in runs:
        told = {k: v for k, v in settings(r.config).items() if k not in PLACES and k != SEED}
        alike = found.setdefault(json.dumps([r.strategy, told], sort_keys=True, default=str), [])
        same = next((group for group in alike if not any(_other_code(one, r) for one in group)), None)
        if same is None:
            alike.append([r])
        else:
            same.append(r)
    firsts = [group[0] for alike in found.values() for group in alike]
    shared, groups = shared_names([r.config for r in firsts]), []
    for by_code in found.values():
        pairs = (pair for a, b in combinations(by_code, 2) for pair in product(a, b))
        changed = sorted({place for a, b in pairs for place in _other_code(a, b)})
        groups += [_group(group, firsts, changed, shared) for group in by_code]
    return groups


def _group(
    runs: Sequence[Result], firsts: Sequence[Result], changed: Sequence[str], shared: Container[str]
) -> RunGroup:
    """The runs with what tells them from the others, of which `firsts` are one each.

    `changed`: the places whose code differs. `shared`: names that are of several settings. What ran
    elsewhere, as Flower's own, has few of our settings, and ours none of its: their names tell them apart.
    """
    first = runs[0]
    alike = [r.config for r in firsts if r.strategy == first.strategy]
    comparable = [r.config for r in firsts if _is_ours(r) == _is_ours(first)]
    common = [k for k in differing(comparable) if not k.startswith("strategy.")]
    keys = [*(k for k in differing(alike) if k.startswith("strategy.")), *common]
    values = settings(first.config)
    told = {k: values[k] for k in keys if k in values}
    code = {place: next((r.code[place] for r in runs if place in r.code), "")[:DIGITS] for place in changed}
    words = (
        *(label_text(k, v, shared) for k, v in told.items()),
        *(f"{k} of code {v}" for k, v in code.items()),
    )
    of_code = {f"code of {place}": digits for place, digits in code.items()}
    return RunGroup(first.strategy, ", ".join([first.strategy, *words]), told | of_code, runs)


def _is_ours(r: Result) -> bool:
    return r.strategy != FLOWER


def _other_code(a: Result, b: Result) -> list[str]:
    """The places whose code was another one, as far as that is known; our own may differ by release."""
    ours = a.anabranch_version == b.anabranch_version
    return [
        place
        for place, known in a.code.items()
        if (ours or is_code(place)) and known and b.code.get(place) and known != b.code[place]
    ]


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(mean(values), deviation(values), min(values), max(values), len(values))


def spread_text(found: Spread | None, text: Callable[[float], str]) -> str:
    """The mean as `text` writes a figure, with the deviation where there is one."""
    if found is None:
        return NOTHING
    return f"{text(found.mean)} ± {text(found.deviation)}" if found.deviation else text(found.mean)


def _spread_of_known(values: Iterable[float | None]) -> Spread | None:
    known = [float(v) for v in values if v is not None]
    return spread(known) if known else None


def _row(group: RunGroup) -> SpreadRow:
    runs = group.runs
    first = runs[0]
    targets, goals = {r.target_accuracy for r in runs}, [r.goal for r in runs]
    goal = next((g for g in goals if g.metric != AUTO), goals[0])
    judged = [[v for p in r.history if (v := goal.value(p.measured)) is not None] for r in runs]
    reached = [p for r in runs if r.time_to_target_s is not None and (p := _reaching(r)) is not None]
    return SpreadRow(
        workload=first.workload,
        kind=first.kind,
        strategy=first.strategy,
        label=group.label,
        settings=group.settings,
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
        metrics=_last_spreads(runs),
        not_finite=sum(lacking(r, n) for r in runs for n in metric_names([r])),
        metric=goal.metric,
        mode=goal.mode,
        target=goal.target if len({g.target for g in goals}) == 1 else None,
        aimed=sum(g.target is not None for g in goals),
        final_value=_spread_of_known(last_value(r, goal.metric) for r in runs),
        best_value=_spread_of_known(max(v, key=goal.signed, default=None) for v in judged),
        worst_tenths=_fairness_spreads(runs, lambda f: f.worst_tenth),
        deviations=_fairness_spreads(runs, lambda f: f.deviation),
    )


def over(metric: str, what: str) -> str:
    """The name of a metric over devices or groups."""
    return f"{metric} over {what}"


def _fairness_spreads(
    runs: Sequence[Result], figure: Callable[[Fairness], float | None]
) -> dict[str, Spread]:
    found: dict[str, list[float]] = {}
    for f in (f for r in runs for f in r.fairness):
        if (known := figure(f)) is not None:
            found.setdefault(over(f.metric, f.over), []).append(known)
    return {name: spread(values) for name, values in found.items()}


def _last_spreads(runs: Sequence[Result]) -> dict[str, Spread]:
    found = {n: _spread_of_known(last_value(r, n) for r in runs) for n in metric_names(runs) if n != ACCURACY}
    return {name: known for name, known in found.items() if known is not None}


def _reaching(r: Result) -> Point | None:
    """The first evaluation at the target."""
    goal = r.goal
    return next((p for p in r.history if goal.reached(p.measured)), None)
