"""Runs at equal time and at equal traffic: what each had come to when all of them were so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from anabranch.core.errors import DataError
from anabranch.reports.against import AT, Against
from anabranch.reports.metrics import shared_metric, value
from anabranch.reports.result import Result
from anabranch.reports.spreads import RunGroup, Spread, grouped, spread
from anabranch.reports.text import bytes_text, count_text, duration_text

AFTER: Mapping[Against, Callable[[float], str]] = {
    "time": duration_text,
    "updates": lambda at: f"{count_text(int(at))} updates",
    "bytes": bytes_text,
}


@dataclass(frozen=True)
class EqualRow:
    """What the runs of a kind had come to, by `metric`, after so many seconds, updates or bytes.

    That is one metric for all kinds, so that what stands side by side can be compared. `value` is None where
    nothing had been measured by then.
    """

    workload: str
    label: str
    against: Against
    at: float
    metric: str
    value: Spread | None


def at_equal(results: Iterable[Result], against: Against = "time", at: float | None = None) -> list[EqualRow]:
    """A row for each kind of run; without `at` that is the end of the run that came least far.

    Raises `DataError` for another measure than those of `AT`, and for an `at` that is no number.
    """
    if against not in AT:
        raise DataError(f"runs are equally far by one of {', '.join(AT)}, not {against!r}")
    _check_number(at, against)
    rows = []
    for (workload, _), groups in grouped(results).items():
        where = _least(groups, against) if at is None else at
        runs = [run for group in groups for run in group.runs]
        metric = shared_metric(runs)
        for group in groups:
            values = [v for run in group.runs if (v := _value(run, metric, against, where)) is not None]
            found = spread(values) if values else None
            rows.append(EqualRow(workload, group.label, against, where, metric, found))
    return rows


def _check_number(at: Any, against: str) -> None:
    if at is not None and (not isinstance(at, Real) or math.isnan(at)):
        raise DataError(f"runs are equally far at a number of {against}, not at {at!r}")


def equally_far(groups: Sequence[RunGroup]) -> dict[str, list[EqualRow]]:
    """Kinds of run side by side, by the heads of three columns; nothing of a single kind."""
    if len(groups) < 2:
        return {}
    runs = [run for group in groups for run in group.runs]
    found = {against: at_equal(runs, against) for against in AT}
    return {f"after {AFTER[against](rows[0].at)}": rows for against, rows in found.items()}


def _least(groups: Sequence[RunGroup], against: Against) -> float:
    ends = [AT[against](run.history[-1]) for group in groups for run in group.runs if run.history]
    return min(ends, default=0.0)


def _value(run: Result, metric: str, against: Against, at: float) -> float | None:
    """Of the last measurement that was not later."""
    known = [p for p in run.history if AT[against](p) <= at]
    return value(known[-1], metric) if known else None
