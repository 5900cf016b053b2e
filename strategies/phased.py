"""Phases: a run that begins with one strategy and goes on with another, as Sync-Switch does.

| symbol          | name   | meaning                                                                     |
|-----------------|--------|-----------------------------------------------------------------------------|
| phase           | phases | tables in their order: `strategy`, its parameters, and the next three       |
| until_updates   |        | it ends when the run has taken so many updates, or this fraction of them all |
| until_versions  |        | it ends when the run has so many versions                                   |
| exclude_slowest |        | this part of the fleet has no part in the phase's rounds                    |
| client          |        | `learning_rate` and `momentum` of the phase's tasks, for those of `[client]` |

A phase ends with the update that fills it. What its strategy still holds becomes a version first, so nothing
is lost, and nothing counts twice; the next strategy begins with its first state, without the directions of
the one before. Whoever trains goes on: an update of a task of the last round arrives in the next phase, as a
stale one of its base. Nothing restarts. Where rounds follow whoever trains is told to stop, as at the end of
any round: what it would send is of no round.

What holds for the whole run cannot change with a phase: the codec of the downlink, the planner of sub-models,
the bound of lengths. Where strategies choose different ones the configuration has to say which.

Source: Li et al., "Sync-Switch", arXiv 2104.08364: rounds first, then none, once; its elastic policy is
`exclude_slowest`. Its gains are of machines in one room, most of them from a restart that is not needed here.
Left out: its search for the moment, and its policy of leaving rounds while somebody is slow, which cost
accuracy in its authors' own data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

from anabranch.core.config.tables import NO_KEY, Config
from anabranch.core.engine.answers import checked_state, checked_step, checked_task, checked_tick
from anabranch.core.engine.strategy import (
    Context,
    LongPartOf,
    Plan,
    Refusal,
    State,
    Step,
    Strategy,
    may_publish,
)
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import Ask, LocalPlan, Reason, Task, Update, Verdict
from anabranch.core.shares import ceil_of
from anabranch.strategies.phases import PhaseTable, check_phases
from anabranch.strategies.robust.rule import Rule

ROUNDS_FIRST = ({"strategy": "fedavg", "until_versions": 10}, {"strategy": "fedbuff"})


@dataclass(frozen=True)
class PhasedState:
    """`phase`: the place of the strategy in charge; `updates`: taken since the run began.

    What that strategy remembers is in a field of its own, `of_0` of the first one, `of_1` of the second.
    """

    phase: int = 0
    updates: int = 0


@lru_cache(maxsize=64)
def _state_of(types: tuple[type[Any], ...]) -> type[Any]:
    """`PhasedState` with a field for what each of these strategies remembers."""
    remembered = [(f"of_{i}", of | None, field(default=None)) for i, of in enumerate(types)]
    own = {"__module__": __name__}
    return make_dataclass("PhasedState", remembered, bases=(PhasedState,), frozen=True, namespace=own)


@dataclass(frozen=True)
class Faster(Collection[str]):
    """The clients but the slowest; who they are is asked when somebody looks."""

    clients: Collection[str]
    is_slow: Callable[[str], bool]

    def __contains__(self, client: object) -> bool:
        return client in self.clients and not self.is_slow(str(client))

    def __iter__(self) -> Iterator[str]:
        return (client for client in self.clients if not self.is_slow(client))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class Phased:
    """One strategy after the other; nothing that was taken is lost where one gives way to the next.

    See the module. `updates_max` is the run's budget, of which an end may be a fraction.
    """

    name: ClassVar[str] = "phased"

    phases: list[Mapping[str, Any]] = field(default_factory=lambda: [dict(table) for table in ROUNDS_FIRST])
    rule: Rule | None = field(default=None, metadata=NO_KEY)
    updates_max: int = field(default=0, metadata=NO_KEY)

    def __post_init__(self) -> None:
        if not isinstance(self.phases, list | tuple) or len(self.phases) < 2:
            raise ConfigError("strategy.phases must be at least two tables: one strategy needs no phases")
        check_phases(self.tables, self.parts)

    # --- what the tables say -----------------------------------------------------------------

    @cached_property
    def tables(self) -> tuple[PhaseTable, ...]:
        """The phases, each taken apart."""
        return tuple(PhaseTable.of(number, table) for number, table in enumerate(self.phases))

    @cached_property
    def parts(self) -> tuple[Strategy, ...]:
        """The strategies, in their order."""
        return tuple(map(self._part, self.tables))

    def _part(self, table: PhaseTable) -> Strategy:
        from anabranch.strategies.registry import make_strategy, with_rule  # which has this one by its name

        if table.name == self.name:
            raise ConfigError(
                f"{table.place}: a phase has no phases of its own: write them one after the other"
            )
        try:
            return with_rule(make_strategy(table.name, table.params), self.rule)
        except ConfigError as error:
            raise ConfigError(f"{table.place}: {error}") from error

    def within(self, config: Config) -> Phased:
        """Itself in a run of this configuration. Raises `ConfigError` where the run has to say more."""
        for table, part in zip(self.tables, self.parts, strict=True):
            if config.submodel.name not in (AUTO, "none") and not part.supports_submodels:
                raise ConfigError(
                    f"{table.place}: {part.name!r} takes whole models only: set submodel.name = 'none'"
                )
        choices: dict[str, tuple[Any, list[Any]]] = {
            "downlink.codec": (config.downlink.codec, [part.downlink(0) for part in self.parts]),
            "submodel.name": (config.submodel.name, [part.submodel for part in self.parts]),
            "robust.clip": (config.robust.clip, [part.clip for part in self.parts]),
        }
        for key, (said, own) in choices.items():
            if said == AUTO and len(set(own)) > 1:
                raise ConfigError(
                    f"strategy.phases: the strategies choose {' and '.join(map(repr, own))} for {key}, which "
                    f"is one for the whole run: set {key}"
                )
        fractions = [t for t in self.tables if 0 < t.phase.until_updates < 1]
        if fractions and not config.run.updates_max:
            raise ConfigError(
                f"{fractions[0].place}.until_updates is a fraction of run.updates_max, which is not set: "
                "set it, or write a whole number"
            )
        return replace(self, updates_max=config.run.updates_max) if fractions else self

    @property
    def state_type(self) -> type[Any]:
        """With what each of the strategies remembers."""
        return _state_of(tuple(part.state_type for part in self.parts))

    @property
    def synchronous(self) -> bool:
        """Whether any phase works in rounds."""
        return any(part.synchronous for part in self.parts)

    @property
    def rolls_back(self) -> bool:
        """Where every phase does."""
        return all(part.rolls_back for part in self.parts)

    @property
    def supports_submodels(self) -> bool:
        """Where all do."""
        return all(part.supports_submodels for part in self.parts)

    @property
    def submodel(self) -> str:
        """The same in every phase, or the configuration says which."""
        return self.parts[0].submodel

    @property
    def needs_base(self) -> bool:
        """Where one does: a task of an earlier phase may be answered in it."""
        return any(part.needs_base for part in self.parts)

    @property
    def mixes_models(self) -> bool:
        """Where any does."""
        return any(part.mixes_models for part in self.parts)

    @property
    def keeps_updates(self) -> bool:
        """Where any does, that knows of it."""
        return any(getattr(part, "keeps_updates", False) for part in self.parts)

    @property
    def clip(self) -> float:
        """The same in every phase, or the configuration says how long."""
        return self.parts[0].clip

    def downlink(self, version: int) -> str:
        """The same in every phase, or the configuration says which."""
        return self.parts[0].downlink(version)

    # --- the strategy in charge --------------------------------------------------------------

    def part(self, state: State) -> Strategy:
        """The strategy in charge."""
        found: Strategy = self.parts[state.phase]
        return found

    def phase(self, state: State) -> str:
        """Which phase it is of how many, and its strategy, in words."""
        return f"phase {state.phase + 1} of {len(self.parts)}, {self.part(state).name}"

    def inner(self, state: State) -> State:
        """What the strategy in charge remembers."""
        return getattr(state, f"of_{state.phase}")

    def _remembers(self, state: State, inner: State) -> State:
        # The same state where nothing has changed: what was made of it beforehand still counts.
        return state if inner is self.inner(state) else replace(state, **{f"of_{state.phase}": inner})

    def _seen(self, state: State, context: Context) -> Context:
        """What the strategy in charge is told: of no slow devices, where they have no part in its rounds."""
        if not self.tables[state.phase].phase.exclude_slowest:
            return context
        return replace(context, clients=Faster(context.clients, lambda c: self._is_slow(state, c, context)))

    def _is_slow(self, state: State, client_id: str, context: Context) -> bool:
        slowness = context.slowness(client_id)
        return slowness is not None and slowness > 1.0 - self.tables[state.phase].phase.exclude_slowest

    def is_synchronous(self, state: State) -> bool:
        """Whether this phase works in rounds."""
        return self.part(state).is_synchronous(self.inner(state))

    def init(self, vector: Vector) -> State:
        """The first phase."""
        part = self.parts[0]
        return self.state_type(of_0=_checked(part, part.init(vector), "init"))

    def admit(self, state: State, ask: Ask, context: Context) -> Refusal | None:
        """As this phase does, but for devices that are too slow for it."""
        excludes = self.tables[state.phase].phase.exclude_slowest
        # Who was drawn before others turned out to be faster is waited for, and so has its turn.
        drawn = ask.client_id in (self.selected(state) or ())
        if excludes and not drawn and self._is_slow(state, ask.client_id, context):
            return Refusal(Reason.NOT_SELECTED, "among the slowest devices, which train once rounds are over")
        return self.part(state).admit(self.inner(state), ask, self._seen(state, context))

    def selected(self, state: State) -> list[str] | None:
        """As this phase does."""
        return self.part(state).selected(self.inner(state))

    def plan(self, state: State, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """As this phase does, with its local training."""
        training = self.tables[state.phase].phase.client
        local = replace(local, **{key: value for key, value in vars(training).items() if value is not None})
        part = self.part(state)
        found = part.plan(self.inner(state), ask, local, self._seen(state, context))
        plan = checked_task(found, f"strategy {part.name!r}", part.state_type, local)
        return replace(plan, state=self._remembers(state, plan.state))

    def on_lost(self, state: State, task: Task, context: Context) -> State:
        """As this phase does."""
        part = self.part(state)
        found = part.on_lost(self.inner(state), task, context)
        return self._remembers(state, _checked(part, found, "on_lost"))

    def timer(self, state: State) -> float | None:
        """As this phase does."""
        return self.part(state).timer(self.inner(state))

    def shifted(self, state: State, versions: int) -> State:
        """As this phase does."""
        part = self.part(state)
        found = part.shifted(self.inner(state), versions)
        return self._remembers(state, _checked(part, found, "shifted"))

    def reopened(self, state: State, training: Collection[str]) -> State:
        """As this phase does."""
        part = self.part(state)
        found = part.reopened(self.inner(state), training)
        return self._remembers(state, _checked(part, found, "reopened"))

    def step(self, state: State, vector: Vector, update: Update, context: Context) -> Step:
        """As this phase does; with its last update it ends."""
        seen, part = self._seen(state, context), self.part(state)
        found = part.step(self.inner(state), vector, update, seen)
        step = checked_step(found, f"strategy {part.name!r}", seen.spec)
        if step.decision is None or step.decision.verdict is Verdict.REJECTED:
            return replace(step, state=state)
        return self._after(replace(state, updates=state.updates + 1), step, vector, seen)

    def long_part(self, state: State, vector: Vector, update: Update, context: Context) -> LongPartOf | None:
        """This phase's."""
        return self.part(state).long_part(self.inner(state), vector, update, self._seen(state, context))

    def long_in(self, state: State, context: Context) -> int:
        """As in this phase."""
        part = self.part(state)
        long_in = getattr(part, "long_in", None)  # there are older ones of others
        return 0 if long_in is None else long_in(self.inner(state), self._seen(state, context))

    def may_publish(self, state: State, context: Context) -> bool:
        """As in this phase, and where the next update is its last: what it holds is applied then."""
        last = self._is_over(replace(state, updates=state.updates + 1), context.version, context.rules)
        return last or may_publish(self.part(state), self.inner(state), self._seen(state, context))

    def on_timer(self, state: State, vector: Vector, context: Context) -> Step | None:
        """As this phase does; with its last version it ends."""
        seen = self._seen(state, context)
        step = _fired(self.part(state), self.inner(state), vector, seen)
        return None if step is None else self._after(state, step, vector, seen)

    # --- the switch --------------------------------------------------------------------------

    def _is_over(self, state: State, version: int, rules: int) -> bool:
        phase = self.tables[state.phase].phase
        if phase.until_versions:
            return bool(version >= phase.until_versions)
        wanted = ceil_of(phase.until_updates, self.updates_max if phase.until_updates < 1 else 1, rules)
        return bool(phase.until_updates and state.updates >= wanted)

    def _after(self, state: State, step: Step, vector: Vector, context: Context) -> Step:
        """The step, and the next phase where it was the last of this one."""
        if not self._is_over(state, context.version + (step.vector is not None), context.rules):
            return replace(step, state=self._remembers(state, step.state))
        if step.vector is None:
            step = self._flushed(state, step, vector, context)
        if step.vector is None:  # what it holds cannot be applied yet: it ends with its next version
            return replace(step, state=self._remembers(state, step.state))
        part = self.parts[state.phase + 1]
        following = _checked(part, part.init(step.vector), "init")
        begun = replace(self._remembers(state, None), phase=state.phase + 1)
        return replace(step, state=self._remembers(begun, following))

    def _flushed(self, state: State, step: Step, vector: Vector, context: Context) -> Step:
        """What this phase's strategy holds as a version, if it has a way to apply it before its time."""
        if step.decision is None:
            return step
        flushed = _fired(self.part(state), step.state, vector, context)
        if flushed is None:
            return step
        if flushed.vector is None:
            return replace(step, state=flushed.state)
        decision = replace(step.decision, verdict=Verdict.PUBLISHED)
        return replace(flushed, decision=decision, dropped=(*step.dropped, *flushed.dropped))


def _checked(part: Strategy, found: State, method: str) -> State:
    return checked_state(found, f"strategy {part.name!r}: {method}", part.state_type)


def _fired(part: Strategy, inner: State, vector: Vector, context: Context) -> Step | None:
    found = part.on_timer(inner, vector, context)
    return checked_tick(found, f"strategy {part.name!r}", part.state_type, context.spec)
