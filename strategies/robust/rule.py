"""What a robust rule is, and how a strategy has its buffer combined by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from anabranch.core.engine.answers import checked_vector
from anabranch.core.model.params import Vector
from anabranch.core.shares import floor_of
from anabranch.strategies.robust.rows import Floats, Row, Rows


class Rule(Protocol):
    """One paper's answer to: what is the mean of these rows, some of which may be anything?

    A frozen dataclass of its parameters, pure. A coordinate that no row covers comes out as 0. It may say by
    `rows.hear` how much of each row is in the result: operators see by it whom a rule leaves out.
    """

    name: ClassVar[str]
    remembers: ClassVar[bool]  # whether the next buffer starts from this one's result

    def combine(self, rows: Rows, before: Floats) -> Floats:
        """The result, shape (size,), of at least one row; `before` is the last one, zeros at first."""
        ...


@dataclass(frozen=True)
class Combined:
    """`direction`, shape (size,), in the model's dtype; `memory` for the state: empty if there is none.

    `heard`: how much of each row the rule has heard, 0 to 1; empty where it does not say.
    """

    direction: Vector
    memory: Vector
    heard: tuple[float, ...] = ()


def combine(rule: Rule, rows: Sequence[Row], vector: Vector, memory: Vector) -> Combined:
    """What a rule makes of a buffer for the model `vector`; `memory` is the last `Combined`'s, or empty.

    Raises `AppError` for what no rule may give.
    """
    before = memory.astype(np.float64) if memory.size else np.zeros(vector.size)
    taken = Rows(rows, vector.size)
    found = checked_vector(rule.combine(taken, before), f"robust rule {rule.name!r}: combine", vector.size)
    direction = found.astype(vector.dtype)
    heard = () if taken.heard is None else tuple(taken.heard.tolist())
    return Combined(direction, direction.copy() if rule.remembers else np.empty(0, vector.dtype), heard)


def hostile(attackers: float, rows: int) -> int:
    """F of n rows, for an assumed fraction: floor(attackers n), but for rounding."""
    return floor_of(attackers, rows)
