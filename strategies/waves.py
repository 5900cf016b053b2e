"""Waves: a version is made once most of who takes part have answered; who is late counts in the next one.

| symbol  | name              | meaning                                                        |
|---------|-------------------|----------------------------------------------------------------|
| n       | state.answered    | devices that have answered since the last version              |
| P       | state.expected    | devices that had answered or trained when that was made        |
| q       | share             | the part of them that a version waits for                      |
| K       | buffer_size       | updates that are enough, however many devices there are        |
| s       | staleness         | staleness function                                             |
| tau_i   | context.staleness | versions since device i started                                |
| Delta_i | update.delta      | w_i - w_base of device i                                       |
| eta     | server_lr         | server learning rate                                           |
| -       | outer             | another server optimiser, in its place                         |

    a version once n >= q P, or with K updates:
    w <- w + eta mean_i s(tau_i) Delta_i

From each version a device trains once: one that has answered waits for the next. For the first version P are
those that have answered or train by then; where nobody trains any more, those that have answered are all that
is expected, and everybody may train again. With q = 1 these are rounds of all who are there, without a draw;
with less nobody waits for the slowest, and nothing of theirs is lost.

What momentum bears depends on how old updates are. On a quadratic, with Nesterov's momentum of 0.9, the
largest stable rate is 5 times smaller where all are one version old, 17 times where they are two. So a
server with momentum wants fresh updates before it wants many: a buffer that fast devices fill again and
again makes more versions, and the slow ones' updates are older in each.

Source: ours. That the next round takes late updates along is in semi-asynchronous protocols such as SAFA (Wu
et al., IEEE Transactions on Computers 2021; recalled). Measured in benchmarks/arena.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeVar

from anabranch.core.config.tables import NO_KEY
from anabranch.core.engine.strategy import Context, Plan, Refusal
from anabranch.core.model.updates import Ask, LocalPlan, Reason, Task, Update
from anabranch.core.shares import ceil_of
from anabranch.strategies.buffer import BufferState, BufferStrategy
from anabranch.strategies.optimisers import Optimiser, Sgd, outer_in_place
from anabranch.strategies.parameters import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, POSITIVE_FRACTION
from anabranch.strategies.robust.rule import Rule

T = TypeVar("T")


@dataclass(frozen=True)
class WavesState(BufferState):
    """A buffer's; `training`: devices, each with its newest task.

    `begun`: devices that have started from the newest version; `answered`: those with an update since it.
    """

    training: dict[str, str] = field(default_factory=dict)
    begun: dict[str, bool] = field(default_factory=dict)
    answered: dict[str, bool] = field(default_factory=dict)
    expected: int = 0


@dataclass(frozen=True)
class Waves(BufferStrategy):
    """Gathers what most of who trains send, each once from a version, and adds the mean.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "waves"
    state_type: ClassVar[type[Any]] = WavesState
    supports_submodels: ClassVar[bool] = True

    share: Annotated[float, POSITIVE_FRACTION] = 0.95
    buffer_size: Annotated[int, AT_LEAST_ONE] = 1000
    server_lr: Annotated[float, POSITIVE] = 1.0
    flush_s: Annotated[float, NOT_NEGATIVE] = 0.0
    staleness: Mapping[str, Any] = field(default_factory=lambda: {"name": "constant"})
    outer: Mapping[str, Any] = field(default_factory=dict)
    rule: Rule | None = field(default=None, metadata=NO_KEY)

    @property
    def rolls_back(self) -> bool:
        """Who trained when a version was made is in no update."""
        return False

    @property
    def optimiser(self) -> Optimiser:
        """Plain, by eta, or `outer`."""
        return outer_in_place(self, {"server_lr": "lr"}, Sgd(self.server_lr))

    # --- who trains --------------------------------------------------------------------------

    def admit(self, state: WavesState, ask: Ask, context: Context) -> Refusal | None:
        """Who has not started from this version yet; everybody where nobody trains."""
        if not state.training or ask.client_id not in state.begun:
            return None
        return Refusal(Reason.AT_CAPACITY, f"has trained from version {context.version}: waits for the next")

    def plan(self, state: WavesState, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """One more trains; where it has trained from this version, nobody else comes who has not."""
        client = ask.client_id
        if client in state.begun:
            state = replace(state, begun={}, expected=len(state.answered))
        training, begun = {**state.training, client: ask.task_id}, {**state.begun, client: True}
        return Plan(replace(state, training=training, begun=begun), local)

    def on_lost(self, state: WavesState, task: Task, context: Context) -> WavesState:
        """It trains no more, and may start from this version again."""
        return _lost(state, {task.client_id}) if _trains(state, task) else state

    def reopened(self, state: WavesState, training: Collection[str]) -> WavesState:
        """Who has lost its task meanwhile trains no more."""
        return _lost(state, state.training.keys() - set(training))

    # --- when there is a version -------------------------------------------------------------

    def gather(self, state: WavesState, update: Update, weight: float, context: Context) -> WavesState:
        """Add to the buffer; one more has answered."""
        client, training, begun = update.client_id, state.training, state.begun
        if _trains(state, update):  # it may train anew, where this is the result of an older task
            training = _without(training, {client})
        if update.base_version == context.version and client not in begun:  # its lease had ended
            begun = {**begun, client: True}
        gathered: WavesState = super().gather(state, update, weight, context)
        answered = {**state.answered, client: True}
        return replace(gathered, training=training, begun=begun, answered=answered)

    def full(self, state: WavesState, context: Context) -> bool:
        """With n >= q P, or K updates."""
        wanted = ceil_of(self.share, state.expected or _taking_part(state), context.rules)
        return bool(len(state.answered) >= wanted or state.count >= self.buffer_size)

    def lacking(self, state: WavesState, context: Context) -> int:
        """The next update may be enough, as who trains may be lost before it comes."""
        return 1

    def emptied(self, state: WavesState, context: Context) -> WavesState:
        """The next wave is expected to be of those that have answered, and those that train."""
        emptied: WavesState = super().emptied(state, context)
        return replace(emptied, begun={}, answered={}, expected=_taking_part(state))


def _taking_part(state: WavesState) -> int:
    """How many devices have answered or train."""
    return len({*state.answered, *state.training})


def _trains(state: WavesState, of: Task | Update) -> bool:
    """Whether a task is what its device trains. By its id: devices may be offered an older version."""
    return state.training.get(of.client_id) == of.task_id


def _lost(state: WavesState, clients: Collection[str]) -> WavesState:
    """Their tasks have come to nothing."""
    return replace(state, training=_without(state.training, clients), begun=_without(state.begun, clients))


def _without(devices: Mapping[str, T], clients: Collection[str]) -> dict[str, T]:
    kept = dict(devices)  # as a whole: of a large fleet, asking for each takes far longer
    for client in clients:
        kept.pop(client, None)
    return kept
