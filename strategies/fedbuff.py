"""FedBuff: K deltas are gathered, then applied together.

| symbol  | name        | meaning                                                |
|---------|-------------|--------------------------------------------------------|
| K       | buffer_size | updates in a buffer                                    |
| eta_g   | server_lr   | server learning rate                                   |
| beta    | momentum    | server momentum (0: plain SGD)                         |
| s       | staleness   | staleness function                                     |
| Delta_i | update.delta| w_i - w_base of device i                               |
| m       | state.moment| running direction of the server                        |

    g = (1/K) sum_i s(tau_i) Delta_i
    m <- beta m + g
    w <- w + eta_g m

With a rule of `robust/` g is what the rule makes of the rows s(tau_i) Delta_i, which are kept one by one.

Concurrency is apart from K: `[server] concurrency`. A device gets its next task at once. With
`flush_s` an old buffer is applied although it is not full, divided by the updates it has.

Source: Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022;
the rule was checked against published code, s = 1/sqrt(1 + tau) is recalled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from anabranch.core.config.tables import NO_KEY
from anabranch.core.engine.strategy import AsyncStrategy, Context, Step, held, published
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Vector, add_scaled
from anabranch.core.model.updates import Update
from anabranch.strategies.robust.rows import Row, StoredRow
from anabranch.strategies.robust.rule import Rule, combine
from anabranch.strategies.staleness import StalenessFunction, make_staleness


@dataclass(frozen=True)
class FedBuffState:
    """`buffer`: sum of s(tau_i) Delta_i, shape (size,); `moment`: m, empty without momentum.

    With a rule `buffer` is empty, `rows` has the updates, and `memory` what the rule remembers.
    """

    buffer: Vector
    moment: Vector
    count: int = 0
    since: float | None = None
    rows: list[StoredRow] = field(default_factory=list)
    memory: Vector = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class FedBuff(AsyncStrategy):
    """See the module for the equations and the symbols."""

    name: ClassVar[str] = "fedbuff"
    state_type: ClassVar[type[Any]] = FedBuffState

    buffer_size: int = 10
    server_lr: float = 1.0
    momentum: float = 0.0
    flush_s: float = 0.0
    staleness: Mapping[str, Any] = field(default_factory=lambda: {"name": "polynomial", "a": 0.5})
    rule: Rule | None = field(default=None, metadata=NO_KEY)

    def __post_init__(self) -> None:
        if self.buffer_size < 1:
            raise ConfigError(f"strategy.buffer_size must be at least 1, not {self.buffer_size!r}")
        if self.server_lr <= 0:
            raise ConfigError(f"strategy.server_lr must be greater than 0, not {self.server_lr!r}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"strategy.momentum must be in [0, 1), not {self.momentum!r}")
        if self.flush_s < 0:
            raise ConfigError(f"strategy.flush_s must not be negative, not {self.flush_s!r}")
        _ = self.s

    @cached_property
    def s(self) -> StalenessFunction:
        """S."""
        return make_staleness(self.staleness)

    def init(self, vector: Vector) -> FedBuffState:
        """An empty buffer."""
        moment = np.zeros_like(vector) if self.momentum else np.empty(0, vector.dtype)
        buffer = np.zeros_like(vector) if self.rule is None else np.empty(0, vector.dtype)
        return FedBuffState(buffer, moment)

    def step(self, state: FedBuffState, vector: Vector, update: Update, context: Context) -> Step:
        """Add to the buffer; apply it when it has K updates."""
        weight = self.s(context.staleness)
        since = context.now if state.since is None else state.since
        state = replace(state, count=state.count + 1, since=since)
        if self.rule is None:
            add_scaled(state.buffer, weight, update.delta)
        else:
            state = replace(state, rows=[*state.rows, StoredRow.of(update, weight)])
        if state.count < self.buffer_size:
            return Step(state, None, held(context.staleness, weight))
        return replace(self._apply(state, vector), decision=published(context.staleness, weight))

    def timer(self, state: FedBuffState) -> float | None:
        """When the oldest update in the buffer has waited for `flush_s`."""
        return state.since + self.flush_s if self.flush_s and state.since is not None else None

    def on_timer(self, state: FedBuffState, vector: Vector, context: Context) -> Step:
        """Apply what there is."""
        return self._apply(state, vector)

    def _apply(self, state: FedBuffState, vector: Vector) -> Step:
        total, count, memory = state.buffer, state.count, state.memory
        if self.rule is not None:
            rows = [Row(r.delta, scale=r.scale) for r in state.rows]
            combined = combine(self.rule, rows, vector, memory)
            total, count, memory = combined.direction, 1, combined.memory
        if self.momentum:
            np.multiply(state.moment, vector.dtype.type(self.momentum), out=state.moment)
            add_scaled(state.moment, 1.0 / count, total)
            add_scaled(vector, self.server_lr, state.moment)
        else:
            add_scaled(vector, self.server_lr / count, total)
        state.buffer.fill(0)
        return Step(replace(state, count=0, since=None, rows=[], memory=memory), vector)
