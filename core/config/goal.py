"""What a run is judged by: one of the App's metrics, which way is better, and a target on the way."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.metrics import ACCURACY, LOSS, name_flaw

if TYPE_CHECKING:  # the tables are checked by what is here
    from anabranch.core.config.tables import RunTable

MAX, MIN = "max", "min"
NO_TARGET = "none"
WAYS = {ACCURACY: MAX, LOSS: MIN}  # metrics of which everybody knows
KEYS = ("metric", "mode", "target", "target_accuracy")

Rank = tuple[bool, float]


@dataclass(frozen=True)
class Goal:
    """`run.metric`, `run.mode` and the target, None where there is none.

    The metric `auto` is the accuracy where the App measures one, or else the loss; its target is of accuracy.
    """

    metric: str = AUTO
    mode: str = AUTO
    target: float | None = None

    @classmethod
    def of(cls, run: RunTable) -> Goal:
        """That of `[run]`. Raises `ConfigError`, naming the key and the fix."""
        _check(run)
        mode = WAYS.get(run.metric, AUTO) if run.mode == AUTO else run.mode
        target = run.target_accuracy or None if run.target == NO_TARGET else float(run.target)
        return cls(run.metric, mode, target)

    @classmethod
    def of_json(cls, config: Mapping[str, Any]) -> Goal:
        """That of a configuration as plain values, of whatever release."""
        from anabranch.core.config.tables import RunTable

        run = config.get("run", {})
        return cls.of(RunTable(**{key: run[key] for key in KEYS if key in run}))

    def among(self, names: Container[str]) -> Goal:
        """This goal with the metric of these that counts: still `auto` where none of them does."""
        if self.metric != AUTO:
            return self
        name = next((n for n in WAYS if n in names), AUTO)
        target = self.target if name in (ACCURACY, AUTO) else None
        return replace(self, metric=name, mode=WAYS.get(name, AUTO), target=target)

    def way(self, name: str) -> str | None:
        """Which way of a metric is better, `max` or `min`; None where nobody has said so."""
        known = self.mode if name == self.metric else WAYS.get(name, AUTO)
        return None if known == AUTO else known

    def value(self, metrics: Mapping[str, float | None]) -> float | None:
        """What counts of a measurement; None where that is not there or not finite."""
        found = metrics.get(self.among(metrics).metric)
        return found if found is not None and math.isfinite(found) else None

    def rank(self, metrics: Mapping[str, float]) -> Rank | None:
        """How good a version is: greater is better. None where what counts is not finite, or not there.

        Where nobody has named a metric, the loss never counts against an accuracy.
        """
        goal, value = self.among(metrics), self.value(metrics)
        return None if value is None else (goal.metric != LOSS or self.metric == LOSS, goal.signed(value))

    def is_better(self, metrics: Mapping[str, float], than: Mapping[str, float] | None) -> bool:
        """Whether a version is better than the best so far, measured as `than`; None: there is none yet."""
        found = self.rank(metrics)
        if found is None or than is None:
            return found is not None
        best = self.rank(than)
        return best is not None and found > best

    def signed(self, value: float) -> float:
        """A number that is the greater, the better the value is."""
        return -value if self.mode == MIN else value

    def reached(self, metrics: Mapping[str, float | None]) -> bool:
        """Whether a measurement is as good as the target, if there is one."""
        goal, value = self.among(metrics), self.value(metrics)
        if value is None or goal.target is None:
            return False
        return goal.signed(value) >= goal.signed(goal.target)

    def lacking(self, names: Collection[str]) -> str:
        """What to say of a measurement without the metric that was named; empty where nothing lacks."""
        if self.metric == AUTO or self.metric in names:
            return ""
        return (
            f"run.metric is {self.metric!r}, and evaluate returns no such metric, but {', '.join(names)}: "
            "set run.metric to one of them, or return it"
        )

    def idle(self, names: Collection[str]) -> str:
        """What to say of a target that a measurement of these metrics tells nothing of; else empty."""
        if self.target is None or self.metric != AUTO or ACCURACY in names:
            return ""
        return (
            f"the target is of the accuracy, and evaluate returns none, but {', '.join(names)}: it is never "
            "reached; set run.metric, run.mode and run.target"
        )


AUTO_GOAL = Goal()


def _check(run: RunTable) -> None:
    if run.metric != AUTO and (flaw := name_flaw(run.metric)):
        raise ConfigError(f"run.metric, {run.metric!r}, {flaw}")
    if run.metric == AUTO and run.mode != AUTO:
        raise ConfigError(
            f"run.mode = {run.mode!r} is of a metric that is named: set run.metric, for example 'accuracy'"
        )
    if run.mode == AUTO and run.metric not in (AUTO, *WAYS):
        raise ConfigError(
            f"run.metric = {run.metric!r} needs run.mode: 'max' where more of it is better, or else 'min'"
        )
    _check_target(run)


def _check_target(run: RunTable) -> None:
    if run.stop_at_target and run.target == NO_TARGET and not run.target_accuracy:
        raise ConfigError("run.stop_at_target needs a target: set run.target_accuracy, or run.target")
    if isinstance(run.target, str) and run.target != NO_TARGET:
        raise ConfigError(f"run.target must be a number or {NO_TARGET!r}, not {run.target!r}")
    if run.target != NO_TARGET and run.metric == AUTO:
        raise ConfigError("run.target is of a metric that is named: set run.metric, for example 'accuracy'")
    if not run.target_accuracy:
        return
    if run.metric not in (AUTO, ACCURACY):
        raise ConfigError(
            f"run.target_accuracy is no target of {run.metric!r}, run.metric: "
            "set run.target, and run.target_accuracy = 0"
        )
    if run.target != NO_TARGET:
        raise ConfigError("run.target and run.target_accuracy are the same here: set one of them")
