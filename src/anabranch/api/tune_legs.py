"""A leg of a tuning: a simulated run, carried on to a share of its budget, and what it has come to there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anabranch.api.halving import Leg, Merit
from anabranch.api.simulating import run_simulation
from anabranch.core.config.goal import MIN
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.reports.intervals import mean
from anabranch.reports.origin import StopRun
from anabranch.reports.result import Point, Result
from anabranch.simulation.run import RunProgress
from anabranch.workloads.app import App

BEYOND = 1 + 1e-9  # a share that is greater than this one's is beyond it
KEPT_GAIN = 0.5  # the share of a trial's gain below which a fresh seed's run has not come to the same


@dataclass(frozen=True)
class TuneBudget:
    """What a run may use: updates, virtual seconds, bytes up and down; 0: as much as it wants."""

    updates: int = 0
    virtual_s: float = 0.0
    traffic_bytes: int = 0

    def share(self, updates: float, virtual_s: float, traffic_bytes: float) -> float:
        """The share that is used: of several budgets, of that which is nearest to its end."""
        pairs = (
            (updates, self.updates),
            (virtual_s, self.virtual_s),
            (traffic_bytes, self.traffic_bytes),
        )
        return max((used / most for used, most in pairs if most), default=0.0)


@dataclass(frozen=True)
class LegEnd:
    """Where a leg has ended: with the last measurement that its share had room for, or before, at its target.

    `value` is None where none was finite, `reached` says whether the target was. `metric` and `mode` are what
    the run is judged by, and `first` is what the first weights came to: None where nobody knows it.
    """

    metric: str
    mode: str
    value: float | None
    reached: bool
    time_s: float
    updates: int
    traffic_bytes: int
    first: float | None = None

    @property
    def gain(self) -> float | None:
        """By how much it is better than the first weights."""
        if self.value is None or self.first is None:
            return None
        return self.first - self.value if self.mode == MIN else self.value - self.first

    def merit(self, aim: str) -> Merit:
        """As it is compared."""
        used = {"time": self.time_s, "updates": self.updates, "bytes": self.traffic_bytes}
        signed = None if self.value is None else self.value if self.mode == "max" else -self.value
        return Merit(signed, -float(used[aim]) if self.reached and aim in used else None)

    def to_json(self) -> dict[str, Any]:
        """Plain values, in the order of the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LegEnd:
        """The inverse; other keys are passed over."""
        return cls(**{name: data[name] for name in cls.__annotations__ if name in data})


def unstable(fresh: Sequence[LegEnd], trials: Sequence[LegEnd]) -> int:
    """From how many fresh seeds a choice came to nothing finite, or to less than half of its trials' gain.

    A choice at the edge of stability does well from a few seeds and collapses from others.
    """
    gains = [end.gain for end in trials if end.gain is not None]
    least = KEPT_GAIN * mean(gains) if gains else 0.0
    return sum(
        end.value is None or (end.gain is not None and least > 0 and end.gain < least) for end in fresh
    )


@dataclass(frozen=True)
class LegJob:
    """A leg, the run that it is of, and where that lies; `share` is of its `budget`."""

    leg: Leg
    config: Config
    app: App | None
    folder: Path
    budget: TuneBudget
    share: float


def carry_leg(job: LegJob) -> LegEnd:
    """Carry a run on to its share, or to its first version, if that comes later within the budget.

    What it has done before is not done again. Raises as `simulate`.
    """

    def stop_there(progress: RunProgress) -> None:
        far = job.budget.share(progress.updates, progress.virtual_s, progress.traffic_bytes)
        most = job.share if progress.evaluated_version else 1.0  # as `end_of` judges it
        if progress.evaluated and far > most * BEYOND:  # so whatever lies before it has been measured
            raise StopRun("the share of the budget is used")

    run = run_simulation(job.config, job.folder, job.app, 0, [stop_there], keep_payloads=False, resume=True)
    return end_of(run.result, job.budget, job.share, job.config.run.stop_at_target)


def end_of(result: Result, budget: TuneBudget, share: float, at_target: bool) -> LegEnd:
    """Where the leg of a run ends: `at_target`, if that is reached, or else where its share is used.

    A large buffer may fill only later. Such a run is judged by its first version: the first weights would say
    nothing of the choice. Raises `ConfigError` where the App measures nothing to judge it by.
    """
    goal = result.goal
    if result.history and goal.metric == AUTO and result.status == "finished" and not result.given_up:
        raise ConfigError(
            "the App measures no accuracy and no loss: name what counts, run.metric and run.mode (--metric)"
        )
    within = [p for p in result.history if _share(budget, p) <= share * BEYOND]
    if not any(p.version for p in within):
        within += [p for p in result.history if p.version and _share(budget, p) <= BEYOND][:1]
    reached = next((p for p in within if goal.reached(p.measured)), None)
    last = reached if at_target and reached else within[-1] if within else None
    if last is None:
        return LegEnd(goal.metric, goal.mode, None, False, 0.0, 0, 0)
    return LegEnd(
        metric=goal.metric,
        mode=goal.mode,
        value=None if result.given_up else goal.value(last.measured),
        reached=reached is not None,
        time_s=last.time_s,
        updates=last.updates,
        traffic_bytes=last.uplink_bytes + last.downlink_bytes,
        first=goal.value(within[0].measured) if within[0].version == 0 else None,
    )


def _share(budget: TuneBudget, point: Point) -> float:
    return budget.share(point.updates, point.time_s, point.uplink_bytes + point.downlink_bytes)
