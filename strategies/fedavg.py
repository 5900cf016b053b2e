"""FedAvg: rounds. A random cohort trains from one version; their mean is the next.

| symbol  | name              | meaning                                                        |
|---------|-------------------|----------------------------------------------------------------|
| m       | clients_per_round | updates that make a round                                      |
| -       | over_selection    | ceil(over_selection * m) devices are asked, the first m count  |
| -       | deadline_s        | a round ends with what has come after this long (0: never)     |
| n_i     | update.examples   | examples of device i                                           |
| Delta_i | update.delta      | w_i - w_t                                                      |

    w_{t+1} = w_t + sum_i n_i Delta_i / sum_i n_i

With sub-models both sums are, for each coordinate, over the devices that cover it; one that nobody covers
stays as it is. So `[submodel] name = "heterofl"` makes it HeteroFL's rule, and `"ist"` independent subnet
training.

With a rule of `robust/` the mean is what the rule makes of the rows Delta_i; n_i does not count then, since a
device may claim any number of examples.

The cohort is a uniform draw of the enrolled devices, fixed for the round, whoever asks first; in
round 0, when the fleet is not known yet, first come is first served. Over-selection and deadline
make it an honest baseline: a synchronous system in practice has both (Bonawitz et al., MLSys 2019).
If nobody has come by the deadline, further devices are drawn, and the first still count. Without a
deadline a round whose whole cohort has left never ends.

Source: McMahan et al., "Communication-efficient learning of deep networks from decentralized data",
AISTATS 2017, algorithm 1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from anabranch.core.config.tables import NO_KEY
from anabranch.core.engine.strategy import (
    AsyncStrategy,
    Context,
    Plan,
    Refusal,
    Step,
    held,
    published,
    rejected,
)
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Vector, add_scaled
from anabranch.core.model.updates import Ask, LocalPlan, Reason, Task, Update
from anabranch.core.rng import rank
from anabranch.strategies.robust.rows import Row, StoredRow, covered_by
from anabranch.strategies.robust.rule import Rule, combine


@dataclass(frozen=True)
class FedAvgState:
    """One round.

    `total` = sum_i n_i Delta_i, shape (size,). `covered` = sum_i n_i for each coordinate; empty as long as
    all updates are of the whole model. `cohort` may take part (None: anybody, round 0), `members` have got
    their task, `answered` have been counted. With a rule `total` is empty, `rows` has the updates, and
    `memory` what the rule remembers.
    """

    total: Vector
    examples: int = 0
    members: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    draws: int = 0
    deadline: float | None = None
    cohort: list[str] | None = None
    covered: Vector = field(default_factory=lambda: np.empty(0))
    rows: list[StoredRow] = field(default_factory=list)
    memory: Vector = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class FedAvg(AsyncStrategy):
    """See the module for the equations and the symbols."""

    name: ClassVar[str] = "fedavg"
    state_type: ClassVar[type[Any]] = FedAvgState
    synchronous: ClassVar[bool] = True
    supports_submodels: ClassVar[bool] = True

    clients_per_round: int = 10
    over_selection: float = 1.3
    deadline_s: float = 60.0
    rule: Rule | None = field(default=None, metadata=NO_KEY)

    def __post_init__(self) -> None:
        if self.clients_per_round < 1:
            raise ConfigError(
                f"strategy.clients_per_round must be at least 1, not {self.clients_per_round!r}"
            )
        if self.over_selection < 1:
            raise ConfigError(f"strategy.over_selection must be at least 1, not {self.over_selection!r}")
        if self.deadline_s < 0:
            raise ConfigError(f"strategy.deadline_s must not be negative, not {self.deadline_s!r}")

    @property
    def selected_per_draw(self) -> int:
        """Devices asked in a round: ceil(over_selection * m)."""
        return math.ceil(self.over_selection * self.clients_per_round)

    def init(self, vector: Vector) -> FedAvgState:
        """Round 0."""
        return FedAvgState(np.zeros_like(vector) if self.rule is None else np.empty(0, vector.dtype))

    def admit(self, state: FedAvgState, ask: Ask, context: Context) -> Refusal | None:
        """Members of the cohort, until all places are taken."""
        places = self.selected_per_draw * (state.draws + 1)
        round_ = context.version
        if state.cohort is not None and ask.client_id not in state.cohort:
            return Refusal(
                Reason.NOT_SELECTED, f"not among the {len(state.cohort)} devices of round {round_}"
            )
        if ask.client_id in state.members or ask.client_id in state.answered:
            return Refusal(Reason.NOT_SELECTED, f"takes part in round {round_} once only")
        if len(state.members) >= places:
            return Refusal(Reason.AT_CAPACITY, f"the {places} places of round {round_} are taken")
        return None

    def selected(self, state: FedAvgState) -> list[str] | None:
        """The cohort."""
        return state.cohort

    def plan(self, state: FedAvgState, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """Enter the device; round 0 starts its clock with the first one."""
        deadline = self._deadline(context) if state.deadline is None else state.deadline
        return Plan(replace(state, members=[*state.members, ask.client_id], deadline=deadline), local)

    def step(self, state: FedAvgState, vector: Vector, update: Update, context: Context) -> Step:
        """Gather; the m-th update ends the round. A late one is not used."""
        if context.staleness > 0:
            detail = f"round {update.base_version} is over, this is round {context.version}"
            return Step(state, None, rejected(context.staleness, Reason.ROUND_OVER, detail))
        state = self._gathered(state, update)
        if len(state.answered) < self._quota(state):
            return Step(state, None, held(0, float(update.examples)))
        step = self._end_round(state, vector, context)
        return replace(step, decision=published(0, float(update.examples)))

    def on_lost(self, state: FedAvgState, task: Task, context: Context) -> FedAvgState:
        """Its place is free again."""
        if task.base_version != context.version:
            return state
        return replace(state, members=[c for c in state.members if c != task.client_id])

    def reopened(self, state: FedAvgState, training: Collection[str]) -> FedAvgState:
        """The places of those who were lost in the meantime are free again."""
        there = {*state.answered, *training}
        return replace(state, members=[c for c in state.members if c in there])

    def timer(self, state: FedAvgState) -> float | None:
        """The deadline."""
        return state.deadline

    def on_timer(self, state: FedAvgState, vector: Vector, context: Context) -> Step:
        """End the round with what has come; if that is nothing, ask further devices."""
        if state.answered:
            return self._end_round(state, vector, context)
        draws = state.draws + 1
        cohort = state.cohort
        if cohort is not None:
            cohort = sorted([*cohort, *self._draw(context, context.version, draws, cohort)])
        return Step(replace(state, draws=draws, cohort=cohort, deadline=self._deadline(context)))

    def _gathered(self, state: FedAvgState, update: Update) -> FedAvgState:
        """The round with one update more."""
        answered = [*state.answered, update.client_id]
        if self.rule is not None:
            return replace(state, answered=answered, rows=[*state.rows, StoredRow.of(update, 1.0)])
        add_scaled(state.total, update.examples, update.delta, update.where)
        covered = self._covered(state, update)
        return replace(state, examples=state.examples + update.examples, answered=answered, covered=covered)

    def _end_round(self, state: FedAvgState, vector: Vector, context: Context) -> Step:
        memory = state.memory
        if self.rule is not None:
            rows = [Row(r.delta, covered_by(r.submodel, context.spec)) for r in state.rows]
            combined = combine(self.rule, rows, vector, memory)
            add_scaled(vector, 1.0, combined.direction)
            memory = combined.memory
        elif state.covered.size:
            mean = np.divide(state.total, state.covered, out=state.total, where=state.covered > 0)
            add_scaled(vector, 1.0, mean.astype(vector.dtype, copy=False))
        else:
            add_scaled(vector, 1.0 / state.examples, state.total)
        state.total.fill(0)
        cohort = self._draw(context, context.version + 1, 0, [])
        begun = FedAvgState(state.total, deadline=self._deadline(context), cohort=cohort, memory=memory)
        return Step(begun, vector)

    def _covered(self, state: FedAvgState, update: Update) -> Vector:
        if update.submodel is None and not state.covered.size:
            return state.covered
        covered = state.covered if state.covered.size else np.full(state.total.size, float(state.examples))
        covered[update.where] += update.examples
        return covered

    def _deadline(self, context: Context) -> float | None:
        return context.now + self.deadline_s if self.deadline_s else None

    def _quota(self, state: FedAvgState) -> int:
        """m, or the whole cohort where the fleet has fewer devices."""
        return (
            self.clients_per_round if state.cohort is None else min(self.clients_per_round, len(state.cohort))
        )

    def _draw(self, context: Context, round_: int, draw: int, but: list[str]) -> list[str]:
        known = set(context.clients).difference(but)
        drawn = heapq.nsmallest(
            self.selected_per_draw, known, key=lambda c: rank(context.seed, "cohort", round_, draw, c)
        )
        return sorted(drawn)
