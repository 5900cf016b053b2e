"""Strategies that keep updates one by one, and weigh them when they are applied.

| symbol   | name                | meaning                                                     |
|----------|---------------------|-------------------------------------------------------------|
| K        | size                | updates in a cache                                          |
| h_c      | update.base_version | the version that device c started from                      |
| Delta_c  | update.delta        | w_c - w_base,c                                              |
| share_c  | shares              | how much update c counts, as things are when it is applied  |
| p        | pull                | how far the model goes                                      |
| S        | s                   | staleness function                                          |

    s_c      = S(t - h_c)
    tau_mean = (1/K) sum_c (t - h_c)
    adding:  w_{t+1} = w_t + p sum_c share_c Delta_c / sum_c share_c
    mixing:  w_{t+1} = (1 - p) w_t + p sum_c share_c (w_base,c + Delta_c) / sum_c share_c

A strategy that needs w_base mixes. With a rule of `robust/` and s_mean = (1/K) sum_c s_c the mean is what the
rule makes of the rows (s_c / s_mean) Delta_c, where models are mixed of (s_c / s_mean) (w_base,c + Delta_c -
w_t); shares do not count then, since a device may claim any number of examples.

A device has one update of each base version in the cache, the newest.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, ClassVar

import numpy as np

from anabranch.core.engine.strategy import Context, Step
from anabranch.core.model.params import Delta, ParamSpec, Vector, add_scaled, lasting_delta
from anabranch.core.model.submodels import Submodel, gathered
from anabranch.core.model.updates import Update
from anabranch.strategies.composition import GatheringStrategy
from anabranch.strategies.robust.rows import Row, places_of
from anabranch.strategies.robust.rule import Combined, combine


@dataclass(frozen=True, eq=False)
class CacheEntry:
    """What the cache keeps of an update."""

    update_id: str
    client: str
    base_version: int
    examples: int
    delta: Delta

    def part(self, spec: ParamSpec | None) -> Submodel | None:
        """The part of the model that it is of: the whole."""
        return None


@dataclass(frozen=True)
class CacheState:
    """`cache`: the updates that wait, oldest first; `bases`: w_base by version (as text).

    `memory`: what the rule remembers, empty without one.
    """

    cache: list[CacheEntry] = field(default_factory=list)
    bases: dict[str, Vector] = field(default_factory=dict)
    since: float | None = None
    memory: Vector = field(default_factory=lambda: np.empty(0))


class CacheStrategy(GatheringStrategy):
    """Gathers K updates one by one, weighed when they are applied.

    Symbols and equations: see the module.
    """

    state_type: ClassVar[type[Any]] = CacheState

    @abstractmethod
    def size(self, context: Context) -> int:
        """K."""

    @abstractmethod
    def pull(self, tau_mean: float) -> float:
        """P, for updates of this mean staleness."""

    def shares(self, state: CacheState, context: Context) -> list[float]:
        """share_c: s_c."""
        return [self.s(tau) for tau in self.taus(state, context)]

    def taus(self, state: CacheState, context: Context) -> list[int]:
        """tau_c: how late each update is by now."""
        return [context.staleness_of(c.part(context.spec), c.base_version) for c in state.cache]

    @property
    def keeps_updates(self) -> bool:
        """Until they are applied."""
        return True

    def init(self, vector: Vector) -> CacheState:
        """An empty cache."""
        begun: CacheState = self.state_type()
        return begun

    def replaced(self, state: CacheState, update: Update) -> tuple[str, ...]:
        """The device's update of the same version."""
        key = (update.client_id, update.base_version)
        return tuple(c.update_id for c in state.cache if (c.client, c.base_version) == key)

    def gather(self, state: CacheState, update: Update, weight: float, context: Context) -> CacheState:
        """Into the cache, with its base where models are mixed."""
        bases = state.bases
        if self.needs_base and str(update.base_version) not in bases:
            assert context.base is not None, "mixing needs w_base"
            bases = {**bases, str(update.base_version): context.base.copy()}
        since = context.now if state.since is None else state.since
        replaced = self.replaced(state, update)
        cache = [*(c for c in state.cache if c.update_id not in replaced), self.entry(update)]
        return replace(state, cache=cache, bases=bases, since=since)

    def entry(self, update: Update) -> CacheEntry:
        """What the cache keeps of an update."""
        kept = lasting_delta(update.delta)
        return CacheEntry(update.update_id, update.client_id, update.base_version, update.examples, kept)

    def full(self, state: CacheState, context: Context) -> bool:
        """With K updates."""
        return len(state.cache) >= self.size(context)

    def lacking(self, state: CacheState, context: Context) -> int:
        """Up to K."""
        return self.size(context) - len(state.cache)

    def apply(self, state: CacheState, vector: Vector, context: Context) -> Step:
        """The cache into the model."""
        taus = self.taus(state, context)
        pull = self.pull(sum(taus) / len(taus))
        if self.rule is not None:
            combined = self.by_rule(state, vector, context)
            add_scaled(vector, pull, combined.direction)
            remembering = replace(self.emptied(state), memory=combined.memory)
            return Step(remembering, vector, heard=combined.heard)
        shares = self.shares(state, context)
        if self.needs_base:
            vector *= vector.dtype.type(1.0 - pull)
        total = _total(shares) or 1.0  # where none counts, neither does p
        for share, c in zip(shares, state.cache, strict=True):
            weight = pull * (share / total)
            if self.needs_base:
                add_scaled(vector, weight, state.bases[str(c.base_version)])
            add_scaled(vector, weight, c.delta)
        return Step(self.emptied(state), vector)

    def emptied(self, state: CacheState) -> CacheState:
        """The state for the next cache."""
        return replace(state, cache=[], bases={}, since=None)

    def shifted(self, state: CacheState, versions: int) -> CacheState:
        """Other numbers for the bases of the cache."""
        cache = [replace(c, base_version=c.base_version + versions) for c in state.cache]
        bases = {str(int(version) + versions): base for version, base in state.bases.items()}
        return replace(state, cache=cache, bases=bases)

    def combined(self, state: CacheState, vector: Vector, context: Context) -> Combined:
        """What the rule makes of the cache."""
        assert self.rule is not None, "the mean is added one by one"
        weights = [self.s(tau) for tau in self.taus(state, context)]
        mean = _total(weights) / len(weights) or 1.0
        rows = []
        for c, weight in zip(state.cache, weights, strict=True):
            delta, part = c.delta, c.part(context.spec)
            if self.needs_base:
                moved = gathered(state.bases[str(c.base_version)], part) - gathered(vector, part)
                add_scaled(moved, 1.0, delta)
                delta = moved
            rows.append(Row(delta, places_of(part), weight / mean))
        return combine(self.rule, rows, vector, state.memory)


def _total(terms: list[float]) -> float:
    """From the first on, each sum rounded, by every Python: since 3.12 `sum` adds what rounding has lost."""
    return reduce(add, terms)
