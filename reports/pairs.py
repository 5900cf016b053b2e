"""Kinds of run against one of them, seed by seed: what a seed brings to both is not in the difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from anabranch.core.errors import DataError
from anabranch.reports.intervals import mean, mean_interval
from anabranch.reports.metrics import last_value, shared_metric, units_of
from anabranch.reports.result import Result
from anabranch.reports.spreads import RunGroup, grouped
from anabranch.reports.text import NOTHING, PERCENT, duration_text, number_text

PAIRED = "by the same seeds, mean and 95 % interval"


@dataclass(frozen=True)
class Difference:
    """How much more one kind has than another, in the mean over `seeds` seeds that both have.

    By the probability of `intervals.LEVEL` the true mean is from `low` to `high`: Student's interval.
    """

    mean: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True)
class PairedRow:
    """A kind of run against `base`, by the last value of `metric` and by the seconds to the target.

    `is_share`: the metric is one, as accuracy, so that differences are read in points of a hundred.
    None where fewer than two seeds of both have it. Of a time also where not all that both have reached the
    target: those that did are no fair draw of all.
    """

    workload: str
    label: str
    base: str
    metric: str
    is_share: bool
    final_value: Difference | None
    time_to_target_s: Difference | None


def paired(results: Iterable[Result], base: str = "") -> list[PairedRow]:
    """A row for each kind of run but the `base` of its workload: a label, or a strategy; else the first.

    Raises `DataError` for a base that is none of the kinds, or of several in one workload.
    """
    rows, labels, found = [], [], not base
    for (workload, _), groups in grouped(results).items():
        labels += [group.label for group in groups]
        bases = [group for group in groups if not base or base in (group.label, group.strategy)]
        if base and len(bases) > 1:
            told = "; ".join(group.label for group in bases)
            raise DataError(f"base = {base!r} is several kinds of run: name one by its label, of {told}")
        found = found or bool(bases)
        runs = [run for group in groups for run in group.runs]
        metric = shared_metric(runs)
        is_share = units_of(metric, [last_value(run, metric) for run in runs]) is PERCENT
        rows += [_row(workload, g, bases[0], metric, is_share) for g in groups if bases and g is not bases[0]]
    if not found:
        raise DataError(f"base = {base!r} is none of the kinds of run: {'; '.join(labels)}")
    return rows


def difference_text(found: Difference | None, text: Callable[[float], str]) -> str:
    """The mean with its interval, as `text` writes a figure: `+1.20 (+0.31 to +2.09)`."""
    if found is None:
        return NOTHING
    middle, low, high = (
        f"{'-' if v < 0 else '+'}{text(abs(v))}" for v in (found.mean, found.low, found.high)
    )
    return f"{middle} ({low} to {high})"


def paired_lines(rows: Sequence[PairedRow]) -> tuple[list[str], list[list[str]]]:
    """The head of a table and its lines, of rows against one base; columns that say nothing are left out."""
    metric = rows[0].metric
    points = rows[0].is_share
    columns = [
        ("strategy", [row.label for row in rows]),
        ("seeds", [str(max((d.seeds for d in _of(row) if d), default=0)) for row in rows]),
        (
            f"final {metric}" + ", points" * points,
            [difference_text(r.final_value, _points if points else number_text) for r in rows],
        ),
        ("time to target", [difference_text(row.time_to_target_s, duration_text) for row in rows]),
    ]
    told = [(head, cells) for head, cells in columns if any(cell != NOTHING for cell in cells)]
    return [head for head, _ in told], [list(line) for line in zip(*(c for _, c in told), strict=True)]


def _points(share: float) -> str:
    return f"{100 * share:.2f}"


def _of(row: PairedRow) -> tuple[Difference | None, Difference | None]:
    return row.final_value, row.time_to_target_s


def _row(workload: str, group: RunGroup, base: RunGroup, metric: str, is_share: bool) -> PairedRow:
    pairs = _pairs(group, base)
    reached = all(run.time_to_target_s is not None for pair in pairs for run in pair)
    return PairedRow(
        workload,
        group.label,
        base.label,
        metric,
        is_share,
        _difference(pairs, lambda run: last_value(run, metric)),
        _difference(pairs, lambda run: run.time_to_target_s) if reached else None,
    )


def _pairs(group: RunGroup, base: RunGroup) -> list[tuple[Result, Result]]:
    """Nothing where a kind has several runs of one seed, as live ones have: nothing says which is whose."""
    mine, theirs = ({run.seed: run for run in kind.runs} for kind in (group, base))
    if len(mine) < len(group.runs) or len(theirs) < len(base.runs):
        return []
    return [(mine[seed], theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())]


def _difference(
    pairs: Sequence[tuple[Result, Result]], figure: Callable[[Result], float | None]
) -> Difference | None:
    known = [(figure(mine), figure(theirs)) for mine, theirs in pairs]
    more = [mine - theirs for mine, theirs in known if mine is not None and theirs is not None]
    interval = mean_interval(more)
    return None if interval is None else Difference(mean(more), *interval, len(more))
