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

Composed of a cache (`cache.py`), in which a device has one update of each base version, the newest. One that
is not full is applied `flush_s` after the first update came into it, though a newer one may have taken that
one's place. An update of more than `staleness_max` versions is not used. A device that died gives its place
back with its lease. Outside the paper's mode at least 4 devices train at a time, however small the fleet:
where ceil(C N) is one, each device waits for all the others, and one that hangs holds all of them up for a
lease.

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

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar

from anabranch.core.config.tables import NO_KEY
from anabranch.core.engine.strategy import Context, Plan, Refusal
from anabranch.core.model.chains import RAW
from anabranch.core.model.updates import Ask, LocalPlan
from anabranch.core.shares import ceil_of
from anabranch.strategies.cache import CacheState, CacheStrategy
from anabranch.strategies.compression_schedule import BITS, DIRECTIONS, Schedule, Strength
from anabranch.strategies.parameters import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_FRACTION,
    Range,
    one_of,
)
from anabranch.strategies.robust.rule import Rule
from anabranch.strategies.schedulers.capped import FEW, at_capacity
from anabranch.strategies.staleness import StalenessFunction, make_staleness

MODES = ("robust", "paper")
PAPER_ALPHA = 0.6
CLIP = 4.0


@dataclass(frozen=True)
class Teasq(CacheStrategy):
    """Gathers K updates in a cache, then mixes their weighted mean into the model, or adds it.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "teasq"

    mode: Annotated[str, one_of(MODES)] = "robust"
    concurrency_fraction: Annotated[float, POSITIVE] = 0.1
    cap: Annotated[int, NOT_NEGATIVE] = 0
    cache_fraction: Annotated[float, POSITIVE_FRACTION] = 0.1
    cache_size: Annotated[int, NOT_NEGATIVE] = 0
    alpha: Annotated[float, FRACTION] = 0.0
    server_lr: Annotated[float, POSITIVE] = 1.0
    a: float = 0.5
    mu: Annotated[float, NOT_NEGATIVE] = 0.005
    staleness_max: Annotated[int, NOT_NEGATIVE] = 50
    flush_s: Annotated[float, NOT_NEGATIVE] = 0.0
    kept: Annotated[float, POSITIVE_FRACTION] = 0.05
    bits: Annotated[int, one_of(BITS)] = 4
    feedback_decay: Annotated[float, FRACTION] = 0.9
    decay_every: Annotated[int, NOT_NEGATIVE] = 100
    decay_direction: Annotated[str, one_of(DIRECTIONS)] = "milder"
    decay_steps: Annotated[int, NOT_NEGATIVE] = 1
    downlink_step: Annotated[float, Range("be in (0, 2]", lambda step: 0 < step <= 2)] = 2.0
    downlink_kept: Annotated[float, POSITIVE_FRACTION] = 1.0
    downlink_bits: Annotated[int, one_of(BITS)] = 8
    rule: Rule | None = field(default=None, metadata=NO_KEY)

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

    def admit(self, state: CacheState, ask: Ask, context: Context) -> Refusal | None:
        """As long as fewer devices than may be are in training."""
        least = 1 if self.mode == "paper" else FEW
        cap = self.cap or max(least, ceil_of(self.concurrency_fraction, len(context.clients), context.rules))
        return at_capacity(context, cap)

    def plan(self, state: CacheState, ask: Ask, local: LocalPlan, context: Context) -> Plan:
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

    def size(self, context: Context) -> int:
        """K."""
        return self.cache_size or max(1, ceil_of(self.cache_fraction, len(context.clients), context.rules))

    def pull(self, tau_mean: float) -> float:
        """alpha_t, or eta S(tau_mean)."""
        return (self.mixing or self.server_lr) * self.s(tau_mean)

    def shares(self, state: CacheState, context: Context) -> list[float]:
        """s_c n_c."""
        taus = self.taus(state, context)
        return [self.s(tau) * c.examples for tau, c in zip(taus, state.cache, strict=True)]
