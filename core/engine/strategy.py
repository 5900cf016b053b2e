"""The interface of a strategy: the decisions of one paper, pure.

A strategy is a frozen dataclass of its parameters. Everything that changes lives in its `State`,
which is data: a dataclass of JSON values, numpy arrays and such dataclasses (lists and dicts of them too).
A snapshot has it by its annotations (`core/plain.py`), so these say what is in it.

Laws, checked for every strategy by `tests/conformance/test_strategies.py`:

1. No clock, no randomness but `core.rng`, no I/O: equal calls give equal results. What is put on
   `context.shelf` is named by its bytes, so that this holds whoever keeps it, and where.
2. The version grows by one exactly when a step returns a vector.
3. A step that rejects leaves state and vector identical. An update that the engine refuses never gets
   to the strategy; its task is lost.
4. The arrays and dicts of the state and the vector that are passed in may be reused (written to): the
   engine hands over a copy of the vector where it still needs the old one, and never needs an old state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from anabranch.core.engine.part_changes import PartChanges
from anabranch.core.engine.shelf import Shelf
from anabranch.core.model.chains import RAW
from anabranch.core.model.params import Delta, ParamSpec, Vector
from anabranch.core.model.submodels import Submodel
from anabranch.core.model.updates import Ask, Decision, LocalPlan, Reason, Task, Update, Verdict
from anabranch.core.rules import NEWEST

State = Any
LongPartOf = Callable[[Update], Any]


class Sums(Protocol):
    """How a private run adds updates up (`core/privacy/mechanism.py`). Sums are float64, (size,).

    `history`: the noise of the newest versions, as far as it counts, which a snapshot has. `updates_needed`:
    how many further updates make a version sooner or later, at least.
    """

    history: list[Vector]
    updates_needed: int

    def part(self, delta: Delta, weight: float) -> Vector:
        """What an update adds, whose length is bounded."""
        ...

    def noised(self, total: Vector, version: int) -> Vector:
        """A sum of parts with the noise of the version that it makes."""
        ...

    def published(self, version: int) -> None:
        """A version was made of a sum."""
        ...


@dataclass(frozen=True)
class Context:
    """What the engine knows at the time of a call. `base` is w_base where the strategy needs it.

    `clients` are the enrolled ones, in their order, as they are during the call. `spec` is the model's; it
    is never None in a run. `slowness` is a client's place among those whose speed is known, 0 the fastest,
    1 the slowest; None of others. `sums`: of a private run, whose strategy adds up by nothing else.
    `beforehand`: what came of `long_part`, where that was made before the step. `uplink_for`: by which chain
    the update of a client travels where a plan wants this one: another where `[uplink] codec` says so or the
    device lacks a stage. `shelf`: for what a state refers to and does not hold. `rules`: the run's
    (`core/rules.py`).
    """

    now: float
    version: int
    seed: int
    clients: Collection[str] = ()
    live_tasks: int = 0
    staleness: int = 0
    base: Vector | None = None
    spec: ParamSpec | None = None
    slowness: Callable[[str], float | None] = lambda _: None
    sums: Sums | None = None
    part_changes: PartChanges = field(default_factory=PartChanges)
    beforehand: Any = None
    uplink_for: Callable[[str, str], str] = lambda _, wanted: wanted
    shelf: Shelf | None = None
    rules: int = NEWEST

    def staleness_of(self, submodel: Submodel | None, base_version: int) -> int:
        """By how much an update is late by now: of some tensors only by versions that changed them."""
        return self.part_changes.staleness(submodel, self.version - base_version)


@dataclass(frozen=True)
class Refusal:
    """The strategy does not want this ask now.

    `places`: how many may train at a time, where that is why; 0: it is not, or nobody knows.
    """

    reason: Reason
    detail: str
    places: int = 0


@dataclass(frozen=True)
class Plan:
    """What a granted task shall do, and the state with the grant counted.

    `uplink`: the codec chain of its update, where `[uplink] codec` leaves that to the strategy.
    """

    state: State
    local: LocalPlan
    uplink: str = RAW


@dataclass(frozen=True)
class Step:
    """The outcome of a call: the new state; the new vector if a version is published.

    `dropped`: updates that were held and will not be folded after all. `heard`: how much of each update is in
    the version, 0 to 1, in the order in which they came; empty: the mean, or a rule that does not say.
    """

    state: State
    vector: Vector | None = None
    decision: Decision | None = None
    dropped: tuple[str, ...] = ()
    heard: tuple[float, ...] = ()


class Strategy(Protocol):
    """One paper's rules. One that mixes models needs the base: w_base of every live task is kept.

    `synchronous`: it works in rounds, at some time at least; `is_synchronous` says whether it does now.
    `submodel` names the planner of its tasks where `[submodel] name` leaves that to the strategy.
    """

    name: ClassVar[str]

    @property
    def state_type(self) -> type[Any]:
        """What its states are: a dataclass."""
        ...

    @property
    def synchronous(self) -> bool:
        """Whether there are rounds."""
        ...

    @property
    def rolls_back(self) -> bool:
        """Whether some of the updates can be folded anew, as if the others had been rejected."""
        ...

    @property
    def supports_submodels(self) -> bool:
        """Whether updates may be of parts of the model."""
        ...

    @property
    def submodel(self) -> str:
        """The planner of its tasks, where `[submodel] name` leaves that to us."""
        ...

    @property
    def needs_base(self) -> bool:
        """Whether the steps want `context.base`."""
        ...

    @property
    def mixes_models(self) -> bool:
        """Whether a version has the w_base of its updates in it, so that older models come back with them."""
        ...

    @property
    def keeps_updates(self) -> bool:
        """Whether a state has deltas as they came: whoever took them in may have copied them (`lasting`)."""
        ...

    @property
    def clip(self) -> float:
        """To how many median lengths a longer update is cut, where `[robust] clip` leaves that to us."""
        ...

    def is_synchronous(self, state: State) -> bool:
        """Whether a new version ends every task of an older one."""
        ...

    def init(self, vector: Vector) -> State:
        """The state before the first update. `vector` has the shape of the model, (size,)."""
        ...

    def admit(self, state: State, ask: Ask, context: Context) -> Refusal | None:
        """Whether this device may have a task now. Changes nothing."""
        ...

    def selected(self, state: State) -> list[str] | None:
        """The devices that alone may be admitted as things are; None: whoever asks first."""
        ...

    def plan(self, state: State, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """The task for an admitted ask; `local` is what the configuration says."""
        ...

    def step(self, state: State, vector: Vector, update: Update, context: Context) -> Step:
        """Take one valid update, of `context.staleness`; the step carries a decision."""
        ...

    def long_part(self, state: State, vector: Vector, update: Update, context: Context) -> LongPartOf | None:
        """What takes long of the step for an update that is like this one, but for the values of its delta.

        It is called with the update itself, in any thread, and writes to no array. None: nothing does.
        """
        ...

    def long_in(self, state: State, context: Context) -> int:
        """The step of how many updates, at least, is the next one with a long part; 0: there is none."""
        ...

    def may_publish(self, state: State, context: Context) -> bool:
        """Whether the next step may publish. If not, its `vector` is the model itself, and read-only."""
        ...

    def on_lost(self, state: State, task: Task, context: Context) -> State:
        """A live task ended without an update of use. Writes to no array; only a timer can publish."""
        ...

    def on_timer(self, state: State, vector: Vector, context: Context) -> Step | None:
        """The moment named by `timer` has come."""
        ...

    def timer(self, state: State) -> float | None:
        """When `on_timer` wants to be called next, on the clock of `context.now`."""
        ...

    def shifted(self, state: State, versions: int) -> State:
        """The state in which every version has a number that is higher by `versions`."""
        ...

    def reopened(self, state: State, training: Collection[str]) -> State:
        """The run goes on after its end, in which no lost task was told; these clients have a task."""
        ...

    def downlink(self, version: int) -> str:
        """The codec of a version's way to the devices, where `[downlink] codec` leaves that to us."""
        ...


class AsyncStrategy:
    """The habits of strategies without rounds: everybody is welcome, no timers.

    A base class to inherit defaults from; the contract is `Strategy`.
    """

    synchronous: ClassVar[bool] = False
    supports_submodels: ClassVar[bool] = False
    submodel: ClassVar[str] = "none"

    @property
    def rolls_back(self) -> bool:
        """Where there are no rounds, whose cohorts were drawn."""
        return not self.synchronous

    @property
    def needs_base(self) -> bool:
        """Deltas are enough."""
        return False

    @property
    def mixes_models(self) -> bool:
        """Nobody else needs a base."""
        return self.needs_base

    @property
    def keeps_updates(self) -> bool:
        """What they come to is enough."""
        return False

    @property
    def clip(self) -> float:
        """Never."""
        return 0.0

    def is_synchronous(self, state: State) -> bool:
        """All the time, or never."""
        return self.synchronous

    def admit(self, state: State, ask: Ask, context: Context) -> Refusal | None:
        """Admit: the engine's concurrency cap is the only limit."""
        return None

    def selected(self, state: State) -> list[str] | None:
        """Nobody is preferred."""
        return None

    def plan(self, state: State, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """The configured local training, on the whole model."""
        return Plan(state, local)

    def long_part(self, state: State, vector: Vector, update: Update, context: Context) -> LongPartOf | None:
        """Nothing takes long."""
        return None

    def long_in(self, state: State, context: Context) -> int:
        """Nothing takes long."""
        return 0

    def may_publish(self, state: State, context: Context) -> bool:
        """Each may."""
        return True

    def on_lost(self, state: State, task: Task, context: Context) -> State:
        """Nobody waits for a lost task."""
        return state

    def on_timer(self, state: State, vector: Vector, context: Context) -> Step | None:
        """No timers."""
        return None

    def timer(self, state: State) -> float | None:
        """No timers."""
        return None

    def shifted(self, state: State, versions: int) -> State:
        """The state knows no versions."""
        return state

    def reopened(self, state: State, training: Collection[str]) -> State:
        """Nobody waits for a lost task."""
        return state

    def downlink(self, version: int) -> str:
        """As it is."""
        return RAW


def may_publish(strategy: Strategy, state: State, context: Context) -> bool:
    """What a strategy says of its next step. There are older ones of others, which say nothing."""
    says = getattr(strategy, "may_publish", None)
    return says is None or bool(says(state, context))


def published(staleness: int, weight: float) -> Decision:
    """The update was folded and a version came of it."""
    return Decision(Verdict.PUBLISHED, staleness, weight)


def held(staleness: int, weight: float) -> Decision:
    """The update was folded into a buffer or waits for its round."""
    return Decision(Verdict.HELD, staleness, weight)


def rejected(staleness: int, reason: Reason, detail: str) -> Decision:
    """The update was not used."""
    return Decision(Verdict.REJECTED, staleness, None, reason, detail)
