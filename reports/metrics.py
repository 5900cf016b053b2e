"""What was measured of versions: accuracy, loss, and whatever else the App's `evaluate` returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anabranch.core.model.metrics import ACCURACY, LOSS, NO_SHARE, ungrouped
from anabranch.reports.result import Point, Result, measured_names
from anabranch.reports.scales import Axis
from anabranch.reports.text import (
    COUNT,
    PERCENT,
    Unit,
    clipped,
    count_text,
    duration_text,
    number_text,
    percent_text,
)

NAME_CHARS_MAX = 24


def value(point: Point, name: str) -> float | None:
    """A figure of a measurement, None where it has none or one that is not finite."""
    return point.measured.get(name)


def metric_names(runs: Iterable[Result]) -> list[str]:
    """What was measured and finite at least once in any of the runs, without what is of groups.

    What the runs are judged by comes first, then accuracy, loss, the App's own.
    """
    known = list(runs)
    names = measured_names(p for r in known for p in r.history)
    judged = [r.goal.metric for r in known if r.goal.metric in names]
    return list(dict.fromkeys([*judged, *ungrouped(names)]))


def last_value(r: Result, name: str) -> float | None:
    """The metric of a run's last measurement; None where there is none."""
    return value(r.history[-1], name) if r.history else None


def shared_metric(runs: Sequence[Result]) -> str:
    """By which runs are put side by side: one metric, also where they have other goals."""
    return next(iter(metric_names(runs)), runs[0].goal.metric)


def lacking(r: Result, name: str) -> int:
    """Measurements without a figure that others of the run have: it was not finite there."""
    missing = sum(value(p, name) is None for p in r.history)
    return missing if missing < len(r.history) else 0


def heading(name: str) -> str:
    """A metric at the beginning of a title; the App's own names stay as they are."""
    return name.capitalize() if name in (ACCURACY, LOSS) else name


def units_of(name: str, values: Iterable[float | None]) -> tuple[Unit, ...]:
    """An accuracy is a share, where it is from 0 to 1; of the others nothing is known."""
    share = name == ACCURACY and all(v is None or 0 <= v <= 1 for v in values)
    return PERCENT if share else COUNT


def metric_text(name: str, figure: float | None, digits: int = 3) -> str:
    """A figure with its unit, if it has one, else with so many digits: `84.13 %`, `0.0312`."""
    return percent_text(figure) if units_of(name, [figure]) is PERCENT else number_text(figure, digits)


NOTHING_LEARNED = (
    "nothing was learned: so few updates fill no buffer of the strategy's, and no round; give the run more "
    "of them, or the strategy a smaller size"
)


def nothing_learned(r: Result) -> str:
    """Why a run has no version, and what to do about it; nothing where it has one, or nobody can tell."""
    if r.versions:
        return ""
    if r.updates_applied:
        return NOTHING_LEARNED
    seconds = r.config["run"]["virtual_s_max"]
    if r.kind != "simulated" or r.status != "finished" or r.given_up or r.updates_rejected or not seconds:
        return ""
    if r.virtual_s is not None and r.virtual_s < seconds:  # more of it is of no use
        return f"nothing was learned: {r.why}"
    lasted = duration_text(seconds)
    return f"nothing was learned: no update came within {lasted} of virtual time; give the run more of it"


def no_share(r: Result) -> str:
    """What is wrong with accuracies that are no shares, and meet any target; nothing where all are."""
    accuracies = [a for p in r.history if (a := value(p, ACCURACY)) is not None]
    return NO_SHARE if r.goal.metric == ACCURACY and any(not 0 <= a <= 1 for a in accuracies) else ""


def left_out_by(r: Result) -> str:
    """What has left updates out that were applied: in a simulation it is a fault."""
    return "rollbacks" if r.kind == "live" else "losses of its server"


def final_text(r: Result) -> str:
    """The last measurement in words: what the run is judged by with the best of it, then the rest.

    And of which version it is, where others came after it.
    """
    names, goal = metric_names([r]), r.goal
    if not names:
        return "no measurement was finite" if r.history else "not measured"
    told = [f"{name} {metric_text(name, value(r.history[-1], name))}" for name in names]
    if goal.metric != names[0]:
        return ", ".join(told)
    known = [v for p in r.history if (v := value(p, names[0])) is not None]
    best = metric_text(names[0], max(known, key=goal.signed))
    last = r.history[-1].version
    at = "" if last == r.versions else f" at version {count_text(last)}"
    return ", ".join([f"{told[0]}{at} (best {best})", *([] if names[0] == ACCURACY else told[1:])])


def axis_of(name: str, runs: Sequence[Result]) -> Axis:
    """The axis of a metric of some runs."""
    units = units_of(name, (value(p, name) for r in runs for p in r.history))
    return Axis(clipped(name, NAME_CHARS_MAX), units, from_zero=False)
