"""TEASQ-Fed: devices apply for tasks, updates wait in a cache, both directions are compressed.

| symbol   | name                 | meaning                                                        |
|----------|----------------------|----------------------------------------------------------------|
| N        | context.clients      | devices                                                        |
| C        | concurrency_fraction | ceil(C N) devices train at a time, unless `cap` says how many  |
| gamma    | cache_fraction       | K = ceil(gamma N), unless `cache_size` says K                  |
| n_c      | update.examples      | examples of device c                                           |
| h_c      | update.base_version  | the version that device c started from                         |
| Delta_c  | update.delta         | w_c - w_base, as the server decodes it                         |
| S        | s                    | S(tau) = (tau + 1)^-a                                          |
| alpha    | alpha                | mixing weight                                                  |
| eta      | server_lr            | server learning rate, where deltas are added                   |
| mu       | mu                   | weight of the proximal term of the local loss                  |
| p_s, p_q | kept, bits           | fraction of values that travel, bits of each                   |

When K updates are in the cache:

    s_c      = S(t - h_c)
    tau_mean = (1/K) sum_c (t - h_c)
    mixing:  w_{t+1} = (1 - alpha_t) w_t + alpha_t sum_c s_c n_c (w_base,c + Delta_c) / sum_c s_c n_c
    adding:  w_{t+1} = w_t + eta S(tau_mean) sum_c s_c n_c Delta_c / sum_c s_c n_c
    alpha_t  = alpha S(tau_mean)

In the robust mode an update longer than 4 times the median length is shortened to that, unless `[robust]
clip` says otherwise (`core/engine/clipping.py`): one device whose training has exploded would end the run.

With a rule of `robust/` and s_mean = (1/K) sum_c s_c the mean is what the rule makes of the rows
(s_c / s_mean) Delta_c, where models are mixed of (s_c / s_mean) (w_base,c + Delta_c - w_t). n_c does not
count then, since a device may claim any number of examples.

A device has one update of each base version in the cache, the newest. A cache that is not full is applied
`flush_s` after its oldest update. An update of more than `staleness_max` versions is not used. A device
that died gives its place back with its lease. Outside the paper's mode at least 4 devices train at a time,
however small the fleet: where ceil(C N) is one, each device waits for all the others, and one that hangs
holds all of them up for a lease.

| mode   | server rule         | uplink                            | downlink                              |
|--------|---------------------|-----------------------------------|---------------------------------------|
| robust | adding              | top-k, integers, error feedback   | the shared delta log                  |
| paper  | mixing, alpha = 0.6 | top-k, integers                   | each version by itself, quantised     |

A value of alpha above 0 means mixing in either mode. The strength of the uplink follows a schedule over
versions (`compression_schedule.py`). Without sparsification: kept = 1. Without quantisation: bits = 32.
Static: decay_every = 0. Without compression: kept = 1 and bits = 32.

Source: Jia, Liu, Zhou, Tian, Dong and Dou, arXiv 2312.15186. Verified in its abstract: devices apply for
tasks; a control parameter on how many train; a cache; weights by staleness; sparsification and quantisation
of what travels; a regularised local loss; compression that changes over time. Recalled, with the formulas
above: the cap, K, S, alpha_t, top-k before quantisation, both directions. Not recoverable: every constant,
the quantiser, and the direction and steps of the schedule. Ours: all defaults; that the wire carries
deltas in both modes (top-k of a model's own weights zeroes most of it, so in the paper mode the
downlink is quantised only, unless `downlink_kept` says otherwise); the robust mode; the newest
update for each version; at least 4 devices at a time; the flush; the lease.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from anabranch.core.model.chains import RAW
from anabranch.core.model.params import Delta, Indices, ParamSpec, Vector, add_scaled
from anabranch.core.model.updates import Ask, LocalPlan, Reason, Update
from anabranch.strategies.compression_schedule import BITS, Schedule, Strength
from anabranch.strategies.robust.rows import Row, stored_delta
from anabranch.strategies.robust.rule import Combined, Rule, combine
from anabranch.strategies.staleness import StalenessFunction, make_staleness

MODES = ("robust", "paper")
PAPER_ALPHA = 0.6
CLIP = 4.0
FEW = 4  # devices that train at a time in a small fleet


@dataclass(frozen=True, eq=False)
class Cached:
    """What the cache keeps of an update."""

    update_id: str
    client: str
    base_version: int
    examples: int
    delta: Delta

    def covers(self, spec: ParamSpec | None) -> slice | Indices:
        """The coordinates that it is of: all."""
        return slice(None)


@dataclass(frozen=True)
class TeasqState:
    """`cache`: the updates that wait, oldest first; `bases`: w_base by version (as text).

    `memory`: what the rule remembers, empty without one.
    """

    cache: list[Cached] = field(default_factory=list)
    bases: dict[str, Vector] = field(default_factory=dict)
    since: float | None = None
    memory: Vector = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class Teasq(AsyncStrategy):
    """See the module for the equations and the symbols."""

    name: ClassVar[str] = "teasq"
    state_type: ClassVar[type[Any]] = TeasqState

    mode: str = "robust"
    concurrency_fraction: float = 0.1
    cap: int = 0
    cache_fraction: float = 0.1
    cache_size: int = 0
    alpha: float = 0.0
    server_lr: float = 1.0
    a: float = 0.5
    mu: float = 0.005
    staleness_max: int = 50
    flush_s: float = 0.0
    kept: float = 0.05
    bits: int = 4
    feedback_decay: float = 0.9
    decay_every: int = 100
    decay_direction: str = "milder"
    decay_steps: int = 1
    downlink_step: float = 2.0
    downlink_kept: float = 1.0
    downlink_bits: int = 8
    rule: Rule | None = field(default=None, metadata=NO_KEY)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"strategy.mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if not 0 < self.downlink_step <= 2:
            raise ConfigError(f"strategy.downlink_step must be in (0, 2], not {self.downlink_step!r}")
        if self.downlink_bits not in BITS:
            raise ConfigError(f"strategy.downlink_bits must be one of {BITS}, not {self.downlink_bits!r}")
        self._check_ranges()
        _ = self.s, self.schedule

    def _check_ranges(self) -> None:
        for key in ("concurrency_fraction", "server_lr"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"strategy.{key} must be greater than 0, not {getattr(self, key)!r}")
        for key in ("cache_fraction", "downlink_kept"):
            if not 0 < getattr(self, key) <= 1:
                raise ConfigError(f"strategy.{key} must be in (0, 1], not {getattr(self, key)!r}")
        for key in ("alpha", "feedback_decay"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(f"strategy.{key} must be in [0, 1], not {getattr(self, key)!r}")
        for key in ("cap", "cache_size", "mu", "staleness_max", "flush_s"):
            if getattr(self, key) < 0:
                raise ConfigError(f"strategy.{key} must not be negative, not {getattr(self, key)!r}")

    @cached_property
    def s(self) -> StalenessFunction:
        """S."""
        return make_staleness({"name": "polynomial", "a": self.a})

    @cached_property
    def schedule(self) -> Schedule:
        """The strength of the uplink over versions."""
        start = Strength(self.kept, self.bits)
        return Schedule(start, self.decay_every, self.decay_direction, self.decay_steps)

    @property
    def mixing(self) -> float:
        """Alpha; 0 where deltas are added."""
        return self.alpha or (PAPER_ALPHA if self.mode == "paper" else 0.0)

    @property
    def needs_base(self) -> bool:
        """Where models are mixed."""
        return self.mixing > 0

    @property
    def clip(self) -> float:
        """Four median lengths in the robust mode."""
        return CLIP if self.mode == "robust" else 0.0

    def init(self, vector: Vector) -> TeasqState:
        """An empty cache."""
        return self._emptied()

    def admit(self, state: TeasqState, ask: Ask, context: Context) -> Refusal | None:
        """As long as fewer devices than may be are in training."""
        least = 1 if self.mode == "paper" else FEW
        cap = self.cap or max(least, math.ceil(self.concurrency_fraction * len(context.clients)))
        if context.live_tasks < cap:
            return None
        return Refusal(Reason.AT_CAPACITY, f"{context.live_tasks} of {cap} devices are in training")

    def plan(self, state: TeasqState, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """Local training with the proximal term; the chain of this version for the result."""
        chain = self.schedule.at(context.version).chain
        feeds_back = self.mode == "robust" and self.feedback_decay > 0 and chain != RAW
        uplink = f"ef({self.feedback_decay:g})|{chain}" if feeds_back else chain
        return Plan(state, replace(local, proximal_mu=self.mu), uplink=uplink)

    def downlink(self, version: int) -> str:
        """The log in the robust mode; in the paper's each version by itself. Raw without compression."""
        start = self.schedule.start
        if start.chain == RAW:
            return RAW
        if self.mode == "robust":
            return f"log({self.downlink_step:g})"
        return Strength(self.downlink_kept, self.downlink_bits).chain

    def step(self, state: TeasqState, vector: Vector, update: Update, context: Context) -> Step:
        """Into the cache; the K-th update empties it into the model."""
        if self.staleness_max and context.staleness > self.staleness_max:
            detail = f"staleness {context.staleness} is over the bound of {self.staleness_max} versions"
            return Step(state, None, rejected(context.staleness, Reason.STALE, detail))
        state, dropped = self._cached(state, update, context)
        weight = self.s(context.staleness)
        if len(state.cache) < self._size(context):
            return Step(state, None, held(context.staleness, weight), dropped)
        step = self._apply(state, vector, context)
        return replace(step, decision=published(context.staleness, weight), dropped=dropped)

    def timer(self, state: TeasqState) -> float | None:
        """When the oldest update in the cache has waited for `flush_s`."""
        return state.since + self.flush_s if self.flush_s and state.since is not None else None

    def on_timer(self, state: TeasqState, vector: Vector, context: Context) -> Step:
        """Apply what there is."""
        return self._apply(state, vector, context)

    def shifted(self, state: TeasqState, versions: int) -> TeasqState:
        """Other numbers for the bases of the cache."""
        cache = [replace(c, base_version=c.base_version + versions) for c in state.cache]
        bases = {str(int(version) + versions): base for version, base in state.bases.items()}
        return replace(state, cache=cache, bases=bases)

    def _size(self, context: Context) -> int:
        return self.cache_size or max(1, math.ceil(self.cache_fraction * len(context.clients)))

    def _cached(
        self, state: TeasqState, update: Update, context: Context
    ) -> tuple[TeasqState, tuple[str, ...]]:
        """The state with the update in its cache, and the update whose place it took."""
        key = (update.client_id, update.base_version)
        older = [c for c in state.cache if (c.client, c.base_version) == key]
        bases = state.bases
        if self.needs_base and str(update.base_version) not in bases:
            assert context.base is not None, "mixing needs w_base"
            bases = {**bases, str(update.base_version): context.base.copy()}
        since = context.now if state.since is None else state.since
        cache = [*(c for c in state.cache if c not in older), self._entry(update)]
        kept = replace(state, cache=cache, bases=bases, since=since)
        return kept, tuple(c.update_id for c in older)

    def _entry(self, update: Update) -> Cached:
        """What the cache keeps of an update."""
        kept = stored_delta(update.delta)
        return Cached(update.update_id, update.client_id, update.base_version, update.examples, kept)

    def _emptied(self, memory: Vector | None = None) -> TeasqState:
        """The state after the cache was applied."""
        made: TeasqState = self.state_type() if memory is None else self.state_type(memory=memory)
        return made

    def _shares(self, state: TeasqState, context: Context) -> list[float]:
        """s_c n_c of the updates in the cache."""
        return [self.s(context.version - c.base_version) * c.examples for c in state.cache]

    def _apply(self, state: TeasqState, vector: Vector, context: Context) -> Step:
        taus = [context.version - c.base_version for c in state.cache]
        shares = self._shares(state, context)
        pull = (self.mixing or self.server_lr) * self.s(sum(taus) / len(taus))
        if self.rule is not None:
            combined = self._combined(self.rule, state, vector, context)
            add_scaled(vector, pull, combined.direction)
            return Step(self._emptied(combined.memory), vector)
        if self.mixing:
            vector *= vector.dtype.type(1.0 - pull)
        for share, c in zip(shares, state.cache, strict=True):
            weight = pull * (share / sum(shares))
            if self.mixing:
                add_scaled(vector, weight, state.bases[str(c.base_version)])
            add_scaled(vector, weight, c.delta)
        return Step(self._emptied(), vector)

    def _combined(self, rule: Rule, state: TeasqState, vector: Vector, context: Context) -> Combined:
        """What a rule makes of the cache."""
        weights = [self.s(context.version - c.base_version) for c in state.cache]
        mean = sum(weights) / len(weights)
        rows = []
        for c, weight in zip(state.cache, weights, strict=True):
            delta, where = c.delta, c.covers(context.spec)
            if self.mixing:
                moved = state.bases[str(c.base_version)][where] - vector[where]
                add_scaled(moved, 1.0, delta)
                delta = moved
            rows.append(Row(delta, where, weight / mean))
        return combine(rule, rows, vector, state.memory)
