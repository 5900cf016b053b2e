"""FedAvg: rounds. A random cohort trains from one version; their mean is the next.

| symbol  | name              | meaning                                                        |
|---------|-------------------|----------------------------------------------------------------|
| m       | clients_per_round | updates that make a round                                      |
| -       | over_selection    | ceil(over_selection * m) devices are asked, the first m count  |
| -       | deadline_s        | a round ends with what has come after this long (0: never)     |
| n_i     | update.examples   | examples of device i                                           |
| Delta_i | update.delta      | w_i - w_t                                                      |
| -       | outer             | what step the mean is: the mean itself, or a server optimiser's |

    w_{t+1} = w_t + sum_i n_i Delta_i / sum_i n_i

With `outer` the sum is not the step, but what a server optimiser makes a step of (`optimisers.py`). With
Nesterov's and many local steps that is DiLoCo (docs/strategies.md).

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
AISTATS 2017, algorithm 1; recalled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from anabranch.core.config.tables import NO_KEY
from anabranch.core.engine.strategy import Context, Plan, Refusal, Step
from anabranch.core.later import LATER_KEY
from anabranch.core.model.params import Indices, Vector
from anabranch.core.model.submodels import add_to_part
from anabranch.core.model.updates import Ask, LocalPlan, Reason, Task, Update
from anabranch.core.rng import lowest
from anabranch.core.shares import ceil_of
from anabranch.strategies.buffer import Aggregate, BufferStrategy, averaged, counted, places_covered
from anabranch.strategies.parameters import AT_LEAST_ONE, NOT_NEGATIVE
from anabranch.strategies.robust.rows import StoredRow
from anabranch.strategies.robust.rule import Rule


@dataclass(frozen=True)
class FedAvgState:
    """One round.

    `total` = sum_i n_i Delta_i, shape (size,). `covered` = sum_i n_i for each coordinate; empty as long as
    all updates are of the whole model. `cohort` may take part (None: anybody, round 0), `members` have got
    their task, `answered` have been counted. With a rule `total` is empty, `rows` has the updates, and
    `memory` what the rule remembers. `moment`, `second`, `decayed` and `steps` are the
    optimiser's.
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
    moment: Vector | None = field(default=None, metadata=LATER_KEY)
    second: Vector | None = field(default=None, metadata=LATER_KEY)
    decayed: Vector | None = field(default=None, metadata=LATER_KEY)
    steps: Vector | None = field(default=None, metadata=LATER_KEY)


@dataclass(frozen=True)
class FedAvg(BufferStrategy):
    """Averages the updates of a random cohort, round by round.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "fedavg"
    state_type: ClassVar[type[Any]] = FedAvgState
    synchronous: ClassVar[bool] = True
    supports_submodels: ClassVar[bool] = True

    clients_per_round: Annotated[int, AT_LEAST_ONE] = 10
    over_selection: Annotated[float, AT_LEAST_ONE] = 1.3
    deadline_s: Annotated[float, NOT_NEGATIVE] = 60.0
    outer: Mapping[str, Any] = field(default_factory=dict)
    rule: Rule | None = field(default=None, metadata=NO_KEY)

    @property
    def updates_in_sum(self) -> int:
        """M."""
        return self.clients_per_round

    def selected_per_draw(self, context: Context) -> int:
        """Devices asked in a round: ceil(over_selection * m)."""
        return ceil_of(self.over_selection, self.clients_per_round, context.rules)

    def init(self, vector: Vector) -> FedAvgState:
        """Round 0."""
        total = np.zeros_like(vector) if self.rule is None else np.empty(0, vector.dtype)
        begun: FedAvgState = self.state_type(total=total, **self.optimiser.init(vector))
        return begun

    def admit(self, state: FedAvgState, ask: Ask, context: Context) -> Refusal | None:
        """Members of the cohort, until all places are taken."""
        places = self.selected_per_draw(context) * (state.draws + 1)
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
        """The cohort, but for those that have had their task."""
        if (cohort := state.cohort) is None:
            return None
        if len(state.members) >= len(cohort):
            return []  # at once: a simulation asks after each event of a round
        had = {*state.members, *state.answered}
        return [client_id for client_id in cohort if client_id not in had]

    def plan(self, state: FedAvgState, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """Enter the device; round 0 starts its clock with the first one."""
        deadline = self._deadline(context) if state.deadline is None else state.deadline
        return Plan(replace(state, members=[*state.members, ask.client_id], deadline=deadline), local)

    def refuse(self, update: Update, context: Context) -> Refusal | None:
        """A late one is not used."""
        if context.staleness == 0:
            return None
        detail = f"round {update.base_version} is over, this is round {context.version}"
        return Refusal(Reason.ROUND_OVER, detail)

    def weight(self, update: Update, context: Context) -> float:
        """n_i; 1 in a private run, since a device may claim any number of examples."""
        return float(update.examples) if context.sums is None else 1.0

    def gather(self, state: FedAvgState, update: Update, weight: float, context: Context) -> FedAvgState:
        """The round with one update more."""
        answered = [*state.answered, update.client_id]
        if self.rule is not None:
            return replace(state, answered=answered, rows=[*state.rows, StoredRow.of(update, 1.0)])
        if context.sums is not None:
            total = state.total + context.sums.part(update.delta, weight)
            return replace(state, total=total, examples=state.examples + 1, answered=answered)
        add_to_part(state.total, weight, update.delta, update.submodel)
        covered = counted(state.covered, state.examples, update, update.examples, state.total.size)
        covered, examples = state.covered if covered is None else covered, state.examples + update.examples
        return replace(state, covered=covered, examples=examples, answered=answered)

    def full(self, state: FedAvgState, context: Context) -> bool:
        """With m updates, or those of the whole cohort where the fleet has fewer devices."""
        return self.lacking(state, context) <= 0

    def lacking(self, state: FedAvgState, context: Context) -> int:
        """Up to as many."""
        cohort = self.clients_per_round if state.cohort is None else len(state.cohort)
        return min(self.clients_per_round, cohort) - len(state.answered)

    def aggregate(self, state: FedAvgState, vector: Vector, context: Context) -> Aggregate:
        """The mean, for each coordinate of those who cover it."""
        if self.rule is not None or context.sums is not None:
            return super().aggregate(state, vector, context)
        if not state.covered.size:
            return Aggregate(state.total, state.examples, state)
        return Aggregate(averaged(state.total, state.covered), 1, state)

    def total(self, state: FedAvgState) -> Vector:
        """The round's sum so far."""
        return state.total

    def covered(self, state: FedAvgState, context: Context) -> slice | Indices:
        """The coordinates that the mean is of."""
        if self.rule is not None:
            return super().covered(state, context)
        return places_covered(state.covered) if state.covered.size else slice(None)

    def emptied(self, state: FedAvgState, context: Context) -> FedAvgState:
        """The next round: its cohort is drawn."""
        state.total.fill(0)
        cohort, deadline = self._draw(context, context.version + 1, 0, []), self._deadline(context)
        begun = replace(state, members=[], draws=0, deadline=deadline, cohort=cohort)
        return replace(begun, examples=0, answered=[], covered=np.empty(0), rows=[])

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
            return self.apply(state, vector, context)
        draws = state.draws + 1
        cohort = state.cohort
        if cohort is not None:
            cohort = sorted([*cohort, *self._draw(context, context.version, draws, cohort)])
        return Step(replace(state, draws=draws, cohort=cohort, deadline=self._deadline(context)))

    def _deadline(self, context: Context) -> float | None:
        return context.now + self.deadline_s if self.deadline_s else None

    def _draw(self, context: Context, round_: int, draw: int, but: list[str]) -> list[str]:
        left_out = set(but)
        known = [c for c in context.clients if c not in left_out] if but else list(context.clients)
        count = self.selected_per_draw(context)
        drawn = lowest(context.seed, "cohort", round_, draw, of=known, count=count)
        return sorted(drawn)
