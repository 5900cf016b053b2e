"""Strategies that gather K updates as their weighted sum, and add the step for its mean to the model.

| symbol   | name         | meaning                                                    |
|----------|--------------|------------------------------------------------------------|
| K        | buffer_size  | updates in a buffer                                        |
| weight_i | weight       | how much update i counts                                   |
| Delta_i  | update.delta | w_i - w_base of device i                                   |

    g = (1/K) sum_i weight_i Delta_i
    w <- w + the optimiser's step for g

Where updates are of parts of the model, K is on each coordinate the number of those that cover it.
With a rule of `robust/` g is what the rule makes of the rows weight_i Delta_i, which are kept one by one. A
buffer that is applied before it is full is divided by the updates it has.

In a private run (`core/privacy/mechanism.py`) the sum is of bounded parts, with noise, and is always divided
by K: how many updates there were would tell of them. The optimiser is that of the
parameter `outer` (`optimisers.py`), of a strategy that has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from anabranch.core.engine.strategy import Context, State, Step
from anabranch.core.later import LATER_KEY
from anabranch.core.model.params import Indices, Vector
from anabranch.core.model.submodels import add_to_part, part_blocks
from anabranch.core.model.updates import Update
from anabranch.strategies.composition import GatheringStrategy
from anabranch.strategies.optimisers import Optimiser, make_outer, stepped
from anabranch.strategies.robust.rows import StoredRow, places_of, stored_part
from anabranch.strategies.robust.rule import Combined, combine


@dataclass(frozen=True)
class BufferState:
    """`buffer`: sum of weight_i Delta_i, shape (size,); `moment`, `second` and more: of the optimiser.

    `covered`: how many updates there are of each coordinate; None as long as all are of the whole model. With
    a rule `buffer` is empty, `rows` has the updates, and `memory` what the rule remembers.
    """

    buffer: Vector
    moment: Vector = field(default_factory=lambda: np.empty(0))
    count: int = 0
    since: float | None = None
    rows: list[StoredRow] = field(default_factory=list)
    memory: Vector = field(default_factory=lambda: np.empty(0))
    second: Vector | None = field(default=None, metadata=LATER_KEY)
    decayed: Vector | None = field(default=None, metadata=LATER_KEY)
    covered: Vector | None = field(default=None, metadata=LATER_KEY)
    steps: Vector | None = field(default=None, metadata=LATER_KEY)


class Aggregate(NamedTuple):
    """`total`, shape (size,), and `number`, whose quotient is g; the state with what the rule remembers.

    `heard`: how much of each update the rule has heard, in their order; empty without one.
    """

    total: Vector
    number: float
    state: State
    heard: tuple[float, ...] = ()


class BufferStrategy(GatheringStrategy):
    """Gathers K updates as one sum, then takes a step of the model by what they come to.

    Symbols and equations: see the module.
    """

    state_type: ClassVar[type[Any]] = BufferState

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.optimiser

    @property
    def buffer_size(self) -> int:
        """K: each update is applied at once."""
        return 1

    @property
    def updates_in_sum(self) -> int:
        """By what the sum of a private run is divided."""
        return self.buffer_size

    @property
    def optimiser(self) -> Optimiser:
        """What step g is: that of the parameter `outer`; g itself where there is none."""
        return make_outer(getattr(self, "outer", {}))

    def init(self, vector: Vector) -> State:
        """An empty buffer."""
        # Not `zeros_like`, which writes the zeros: these take no memory before the first update.
        buffer = np.zeros(vector.size if self.rule is None else 0, vector.dtype)
        return self.state_type(buffer=buffer, **self.optimiser.init(vector))

    def gather(self, state: State, update: Update, weight: float, context: Context) -> State:
        """Add to the buffer."""
        since, before = context.now if state.since is None else state.since, state.count
        more = partial(replace, state, count=before + 1, since=since)
        if self.rule is not None:
            return more(rows=[*state.rows, StoredRow.of(update, weight)])
        if context.sums is not None:
            return more(buffer=state.buffer + context.sums.part(update.delta, weight))
        add_to_part(state.buffer, weight, update.delta, update.submodel)
        return more(covered=counted(state.covered, before, update, 1, state.buffer.size))

    def full(self, state: State, context: Context) -> bool:
        """With K updates."""
        return bool(state.count >= self.buffer_size)

    def lacking(self, state: State, context: Context) -> int:
        """Up to K."""
        return self.buffer_size - int(state.count)

    def aggregate(self, state: State, vector: Vector, context: Context) -> Aggregate:
        """What g is; of each coordinate the quotient by the updates that cover it."""
        if context.sums is not None:
            noised = context.sums.noised(self.total(state), context.version + 1)
            return Aggregate(noised.astype(vector.dtype, copy=False), self.updates_in_sum, state)
        if self.rule is None and state.covered is not None:
            return Aggregate(averaged(state.buffer, state.covered), 1, state)
        if self.rule is None:
            return Aggregate(state.buffer, state.count, state)
        combined = self.by_rule(state, vector, context)
        remembering = replace(state, memory=combined.memory)
        return Aggregate(combined.direction, 1, remembering, combined.heard)

    def combined(self, state: State, vector: Vector, context: Context) -> Combined:
        """What the rule makes of the rows."""
        assert self.rule is not None, "the mean is of a sum"
        return combine(self.rule, [row.row(context.spec) for row in state.rows], vector, state.memory)

    def total(self, state: State) -> Vector:
        """The sum so far."""
        buffer: Vector = state.buffer
        return buffer

    def covered(self, state: State, context: Context) -> slice | Indices:
        """The coordinates that g is of."""
        if self.rule is None:
            return slice(None) if state.covered is None else places_covered(state.covered)
        covers = [places_of(stored_part(row.submodel, context.spec)) for row in state.rows]
        parts = [at for at in covers if not isinstance(at, slice)]
        return np.unique(np.concatenate(parts)) if parts and len(parts) == len(covers) else slice(None)

    def apply(self, state: State, vector: Vector, context: Context) -> Step:
        """The optimiser's step for g, and an empty buffer."""
        total, count, state, heard = self.aggregate(state, vector, context)
        state = stepped(self.optimiser, state, vector, total, count, self.covered(state, context))
        return Step(self.emptied(state, context), vector, heard=heard)

    def of_total(self, state: State, vector: Vector, total: Vector, context: Context) -> Step:
        """The step for a sum of K updates that was made where nobody could see one of them."""
        state = stepped(self.optimiser, state, vector, total, self.updates_in_sum, slice(None))
        return Step(self.emptied(state, context), vector)

    def emptied(self, state: State, context: Context) -> State:
        """The state for the next buffer."""
        state.buffer.fill(0)
        return replace(state, count=0, since=None, rows=[], covered=None)


@dataclass(frozen=True)
class WeighedState(BufferState):
    """A buffer's; `share`: what its updates count together. `covered` has that for each coordinate."""

    share: float = 0.0


class WeighedBuffer(BufferStrategy):
    """Divides the sum by what its updates count together, and not by their number."""

    state_type: ClassVar[type[Any]] = WeighedState
    supports_submodels: ClassVar[bool] = True

    def share_of(self, update: Update, weight: float) -> float:
        """How much an update counts: its weight."""
        return weight

    def gather(self, state: State, update: Update, weight: float, context: Context) -> State:
        """Add share_i Delta_i to the buffer."""
        since, share = context.now if state.since is None else state.since, self.share_of(update, weight)
        add_to_part(state.buffer, share, update.delta, update.submodel)
        covered = counted(state.covered, state.share, update, share, state.buffer.size)
        return replace(state, count=state.count + 1, since=since, covered=covered, share=state.share + share)

    def aggregate(self, state: State, vector: Vector, context: Context) -> Aggregate:
        """The weighed sum and what its updates count, or their quotient on each coordinate."""
        if state.covered is not None:
            return Aggregate(averaged(state.buffer, state.covered), 1, state)
        return Aggregate(state.buffer, state.share or 1.0, state)  # where none counts the sum is 0

    def emptied(self, state: State, context: Context) -> State:
        """The state for the next buffer."""
        return replace(super().emptied(state, context), share=0.0)


def counted(covered: Vector | None, before: float, update: Update, amount: float, size: int) -> Vector | None:
    """What counts on each of `size` coordinates, with an update of `amount` more than `before`.

    None, and an empty one, stand for the same on all of them.
    """
    whole = covered is None or not covered.size
    if update.submodel is None and whole:
        return covered
    found = np.full(size, float(before)) if covered is None or whole else covered
    for block in part_blocks(update.submodel, size):
        block.put(block.take(found) + amount, found)
    return found


def averaged(total: Vector, covered: Vector) -> Vector:
    """The mean on each coordinate that is covered, and zero on the others; written into `total`."""
    mean = np.divide(total, covered, out=total, where=covered > 0)
    return mean.astype(total.dtype, copy=False)


def places_covered(covered: Vector) -> slice | Indices:
    """The coordinates that anything is of."""
    return slice(None) if covered.all() else np.flatnonzero(covered)
