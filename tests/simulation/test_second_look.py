"""Parts of one's own that give other results for the same: a restart would come to another run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from own_parts import forgotten

import anabranch as ab
from anabranch.core.engine.strategy import Plan, Refusal
from anabranch.core.errors import AppError, LogLost
from anabranch.core.model.updates import Reason
from anabranch.core.rng import stream
from anabranch.host.chain import Mark
from anabranch.server.history import History
from anabranch.server.recovery import check_mark
from anabranch.server.store.base import RunInfo
from anabranch.strategies.mixing import MixingStrategy
from anabranch.strategies.registry import STRATEGIES
from anabranch.strategies.schedulers.registry import SCHEDULERS
from anabranch.strategies.schedulers.scheduler import OpenScheduler
from anabranch.strategies.submodels.planner import GroupPlanner
from anabranch.strategies.submodels.registry import PLANNERS

TURNS = itertools.count()


class Drawn(GroupPlanner):
    """Draws as it likes."""

    name: ClassVar[str] = "drawn"

    def kept(self, state: Any, vector: Any, applicant: Any) -> Any:
        return [np.random.permutation(group.size)[: group.size // 2] for group in self.spec.groups]


class Seeded(GroupPlanner):
    """Draws by the task's seed."""

    name: ClassVar[str] = "seeded"

    def kept(self, state: Any, vector: Any, applicant: Any) -> Any:
        draws = stream(applicant.seed, "mine")
        return [draws.permutation(group.size)[: group.size // 2] for group in self.spec.groups]


class Counted(GroupPlanner):
    """Remembers in itself."""

    name: ClassVar[str] = "counted"
    count = 0

    def kept(self, state: Any, vector: Any, applicant: Any) -> Any:
        self.count += 1
        return [np.arange(self.count % 2, group.size, 2) for group in self.spec.groups]


@dataclass(frozen=True)
class AnySteps(OpenScheduler):
    name: ClassVar[str] = "any_steps"

    def plan(self, state: Any, ask: Any, plan: Any, context: Any) -> Plan:
        return Plan(state, replace(plan.local, steps=random.randint(1, 10**6)), plan.uplink)


@dataclass(frozen=True)
class InTurns(OpenScheduler):
    """Its module remembers who is next: three in four asks are not refused."""

    name: ClassVar[str] = "in_turns"

    def admit(self, state: Any, ask: Any, context: Any) -> Refusal | None:
        return None if next(TURNS) % 4 else Refusal(Reason.NOT_SELECTED, "the next one")


@dataclass(frozen=True)
class Noisy(MixingStrategy):
    name: ClassVar[str] = "noisy"

    def weight(self, update: Any, context: Any) -> float:
        return random.random()


@dataclass(frozen=True)
class LastLoss:
    """Of the update that came last; NaN before."""

    value: float


@dataclass(frozen=True)
class Unheard(OpenScheduler):
    """Has a NaN in its state, made anew each time."""

    name: ClassVar[str] = "unheard"
    state_type: ClassVar[type[Any]] = LastLoss

    def init(self) -> Any:
        return LastLoss(float("nan"))

    def plan(self, state: Any, ask: Any, plan: Any, context: Any) -> Plan:
        return Plan(LastLoss(float("nan")), plan.local, plan.uplink)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with forgotten():
        yield


def simulated(part: type[Any]) -> ab.Run:
    settings: dict[str, Any] = {"run.virtual_s_max": 50.0}
    strategy: Any = "fedasync"
    if issubclass(part, GroupPlanner):
        settings["submodel.name"] = PLANNERS.named(part)
    elif issubclass(part, OpenScheduler):
        settings["strategy.scheduler"] = {"name": SCHEDULERS.named(part)}
    else:
        strategy = part()
    fleet, until = ab.Fleet(clients=4), ab.Until(updates=20)
    return ab.simulate("synthetic", strategy=strategy, fleet=fleet, until=until, settings=settings)


@pytest.mark.parametrize(
    ("part", "who"),
    [
        (Drawn, "planner 'drawn': the same ask of "),
        (Counted, "planner 'counted': the same ask of "),
        (AnySteps, "scheduler 'any_steps': the same ask of "),
        (InTurns, "scheduler 'in_turns': the same ask of "),
        (Noisy, "strategy 'noisy': the same update "),
    ],
)
def test_a_part_that_gives_something_else_for_the_same_ends_the_run(part: type[Any], who: str) -> None:
    """It went on until a server was started again, which then blamed its data."""
    with pytest.raises(AppError, match=f"^{who}.*came to something else when it was handled again"):
        simulated(part)


@pytest.mark.parametrize("part", [Seeded, Unheard])
def test_one_that_draws_by_its_seed_or_keeps_a_nan_goes_on(part: type[Any]) -> None:
    found = simulated(part).result
    assert found.updates_applied >= 8  # so that four asks and four updates were handled twice


def test_a_log_that_comes_to_something_else_may_be_a_parts_fault() -> None:
    info = RunInfo("run", "mine", {}, [], "00" * 32, 0.0)
    history, mark = History(info), Mark("run", 3, "00" * 32)
    with pytest.raises(LogLost, match=r"after `anabranch admin attest-restore` .*PostgreSQL\)$"):
        check_mark(mark, history, 3)
    STRATEGIES.named(Noisy)
    with pytest.raises(LogLost, match=r"; or strategy 'noisy' gives other results than it gave: it draws"):
        check_mark(mark, history, 3)
