"""A study of Optuna as the second form of `sweep`: it chooses, each choice is run from the same seeds.

The study has a row for each choice in a storage of its own; with a file, `sqlite:///study.db`, and an `out`
folder a sweep that was broken off goes on, inside of a run too. What was measured on the way is told as it
comes, so a pruner of the study ends choices that lag behind others at the same seed and measurement.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from anabranch.api.configuration import Choice
from anabranch.api.progress import LiveBar
from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import RunTable
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.reports.intervals import mean
from anabranch.reports.origin import StopRun
from anabranch.reports.result import Result
from anabranch.simulation.run import RunProgress

log = logging.getLogger(__name__)

PROGRAM = "program"  # a trial's attribute: who has it in hand, HOST:PID
SEED_STEPS = 10**9  # the step of a measurement is its number from 0, and so many more for each seed before


class OptunaTrial(Protocol):
    """What is used of `optuna.Trial`."""

    number: int
    params: dict[str, Any]

    def report(self, value: float, step: int) -> None:
        """An intermediate value."""

    def should_prune(self) -> bool:
        """Whether it is worth going on."""


class OptunaStudy(Protocol):
    """What is used of `optuna.Study`."""

    @property
    def direction(self) -> Any:
        """What it strives for."""

    @property
    def directions(self) -> list[Any]:
        """The same of each of its values."""
        ...

    @property
    def trials(self) -> list[Any]:
        """All of them, from the storage."""
        ...

    def ask(self, fixed_distributions: Any = None) -> Any:
        """A new trial."""

    def tell(self, trial: int, values: Any = None, state: Any = None) -> Any:
        """What came of one."""

    def enqueue_trial(self, params: dict[str, Any]) -> Any:
        """The parameters of the next one."""


# Which parameters there are: a distribution each, or a function that asks a trial for them.
Space = Mapping[str, Any] | Callable[[Any], Choice]
Simulate = Callable[[Choice, int, Callable[[RunTable, RunProgress], None]], Result]  # a choice from a seed


def is_study(grid: object) -> bool:
    """Whether it is one of Optuna's; that need not be installed."""
    return all(hasattr(grid, name) for name in ("ask", "tell", "enqueue_trial"))


@dataclass
class StudySweep:
    """A study that is carried on until it has `trials` trials with an end; `simulate` runs a choice.

    What has been tried before with an end is run no more. `choices`: of those trials, in their order.
    """

    study: OptunaStudy
    space: Space
    trials: int
    seeds: Sequence[int]
    simulate: Simulate
    bar: LiveBar
    choices: list[Choice] = field(default_factory=list)
    _exhausted: bool = False

    def run(self) -> None:
        """Raises `ConfigError` where the study strives the other way, and what `simulate` raises."""
        if len(self.study.directions) > 1:
            raise ConfigError(
                "the study has several directions, and a choice has one value: create_study(direction=...)"
            )
        self._take_up()
        while (done := len(self._ended())) < self.trials and not self._exhausted:
            self.bar.show(done / self.trials, f"{done} of {self.trials} choices")
            fixed = None if callable(self.space) else dict(self.space)
            self._try(self.study.ask(fixed))
        self.bar.show(1.0, f"{self.trials} of {self.trials} choices")
        self.choices = [self.choice_of(trial) for trial in self._ended() if trial.state.name == "COMPLETE"]

    def choice_of(self, trial: Any) -> Choice:
        """What is run for a trial, new or from the storage."""
        if not callable(self.space):
            return dict(trial.params)
        from optuna.trial import FixedTrial

        return self.space(FixedTrial(trial.params, trial.number))

    def _ended(self) -> list[Any]:
        return [trial for trial in self.study.trials if trial.state.name in ("COMPLETE", "PRUNED")]

    def _take_up(self) -> None:
        """What a sweep had in hand that was broken off comes first, with the same parameters.

        What others have in hand, as programs that share the work, is theirs.
        """
        from optuna.trial import TrialState

        running = [trial for trial in self.study.trials if trial.state == TrialState.RUNNING]
        for trial in running:
            if _is_over(trial.user_attrs.get(PROGRAM, "")):
                self.study.enqueue_trial(trial.params)  # first: a choice twice is better than one lost
                self._end(trial.number, state=TrialState.FAIL)  # the study goes on, whatever is left
        if unknown := [trial.number for trial in running if PROGRAM not in trial.user_attrs]:
            log.warning(
                "trials %s of the study are under way, and nobody says in which program, as those that an "
                "earlier checkout began: enqueue_trial(study.trials[n].params), then study.tell(n, "
                "state=TrialState.FAIL), have the choice of one tried again that none is at",
                ", ".join(map(str, unknown)),
            )

    def _try(self, trial: Any) -> None:
        from optuna.exceptions import TrialPruned
        from optuna.trial import TrialState

        trial.set_user_attr(PROGRAM, f"{socket.gethostname()}:{os.getpid()}")
        try:
            value = self._value(trial)
        except TrialPruned:  # which the space raises of what it does not want
            value = None
        except ConfigError:  # it would be no other the next time
            self._tell(trial, state=TrialState.FAIL)
            raise
        if value is None:
            self._tell(trial, state=TrialState.PRUNED)
        else:
            self._tell(trial, value)

    def _tell(self, trial: Any, value: float | None = None, state: Any = None) -> None:
        """What came of a trial. After the sampler's last choice some may wait that are taken up again."""
        if self._end(trial.number, value, state):
            self._exhausted = not any(trial.state.name == "WAITING" for trial in self.study.trials)

    def _end(self, number: int, value: float | None = None, state: Any = None) -> bool:
        """What came of a trial; whether the sampler has no other choice."""
        try:
            self.study.tell(number, value, state)
        except (RuntimeError, KeyError) as error:
            # By a RuntimeError a sampler ends a study, as GridSampler does where nothing is left. By a
            # KeyError that one finds no place in its grid for what was enqueued. The value is there then.
            if not self.study.trials[number].state.is_finished():
                raise
            return isinstance(error, RuntimeError)
        return False

    def _value(self, trial: Any) -> float | None:
        """The mean over the seeds; None of a choice that is not worth going on, or has diverged."""
        choice = self.space(trial) if callable(self.space) else dict(trial.params)
        values = []
        for place, seed in enumerate(self.seeds):
            teller = TrialTeller(trial, place)
            result = self.simulate(choice, seed, teller)
            teller.tell_all(result)
            if result.status == "finished":
                self._check_direction(result)
            if teller.pruned or result.final_value is None:
                return None
            values.append(result.final_value)
        return mean(values)

    def _check_direction(self, result: Result) -> None:
        if result.metric == AUTO:
            raise ConfigError(
                "the App measures no accuracy and no loss: say until=Until(metric=..., mode=...)"
            )
        strives = str(self.study.direction.name).lower()
        if not strives.startswith(result.mode):
            raise ConfigError(
                f"the study is to {strives}, and of {result.metric} the {result.mode}imum is best: "
                f"create_study(direction='{result.mode}imize')"
            )


def _is_over(program: str) -> bool:
    """Whether a program of this machine has ended, or is this one, which begins anew."""
    host, _, number = program.rpartition(":")
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return int(number) == os.getpid()


class TrialTeller:
    """Tells a trial what its run from the `place`th seed has measured; ends the run where it is pruned."""

    def __init__(self, trial: OptunaTrial, place: int) -> None:
        self._trial, self._place, self._told = trial, place, 0
        self.pruned = False

    def __call__(self, run: RunTable, progress: RunProgress) -> None:
        """A run of these settings goes on. Raises `StopRun`."""
        if progress.evaluated:
            self._tell(Goal.of(run).value(progress.metrics))
            if self.pruned:
                raise StopRun("pruned")

    def tell_all(self, result: Result) -> None:
        """What is there of a run that had ended before."""
        for point in result.history[self._told :]:
            self._tell(result.goal.value(point.measured))

    def _tell(self, value: float | None) -> None:
        step, self._told = self._place * SEED_STEPS + self._told, self._told + 1
        if value is not None and not self.pruned:
            self._trial.report(value, step)
            self.pruned = self._trial.should_prune()
