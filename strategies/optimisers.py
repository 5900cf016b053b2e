"""Server optimisers: what step of the model the mean of a buffer or of a round is.

| symbol | name       | meaning                                                      |
|--------|------------|--------------------------------------------------------------|
| D      | total/count| the mean of the updates, or what a robust rule makes of them |
| lr     | lr         | learning rate of the server                                  |
| mu     | momentum   | how much of the last direction stays                         |
| b2     | beta2      | how much of the mean square stays                            |
| m, v   | moment,    | direction and mean square, zeros at first                    |
|        | second     |                                                              |
| t      | steps      | steps so far, this one with them                             |

    sgd       w <- w + lr D
    momentum  m <- mu m + D;  w <- w + lr m
    nesterov  m <- mu m + D;  w <- w + lr (D + mu m)
    adam      m <- mu m + (1 - mu) D;  v <- b2 v + (1 - b2) D^2
              w <- w + lr m / (1 - mu^t) / (sqrt(v / (1 - b2^t)) + eps)    D within +-1.8e19 (float32)
    schedule_free
              g = m + lr D;  m <- (1 - 1/t) g;  w <- w + lr (1 - mu) D + mu g / t

The last is written with z, which takes the steps, x, the mean of all z, and w = (1 - mu) z + mu x between
them, at which devices train: here m = z - x, so that one vector is remembered. It is a momentum whose memory
is as long as the run, whose steps become shorter by themselves.

Where updates are of parts of the model, a coordinate that none of them covers stays as it is, and so do its
m, v and t: they are of each coordinate, and no direction fades that nobody has looked at.

Source: Reddi et al., "Adaptive federated optimization", ICLR 2021, for optimisers at the server; Nesterov's
is that of `torch.optim.SGD(nesterov=True)` on -D, as DiLoCo's published code has it. Defazio et al., "The
road less scheduled", NeurIPS 2024, for schedule_free, which is of gradients there; at a server it is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import numpy as np

from anabranch.core.config.tables import build
from anabranch.core.engine.strategy import State
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Indices, Vector, add_scaled
from anabranch.strategies.parameters import LESS_THAN_ONE, POSITIVE, check_parameters

OUTER = "strategy.outer"


class Optimiser(Protocol):
    """One rule for the step. A frozen dataclass of its parameters, pure.

    What it remembers are fields of the strategy's state, so that a strategy says them with the others.
    """

    def init(self, vector: Vector) -> dict[str, Any]:
        """Its fields of the state before the first step. Of an array the last axis is of coordinates."""
        ...

    def step(self, state: State, vector: Vector, total: Vector, count: float) -> State:
        """Add the step for the mean `total / count`, (size,), to `vector`; the state with its fields.

        It may write on its own arrays of the state; `total` is not its own.
        """
        ...


@dataclass(frozen=True)
class Sgd:
    """w <- w + lr D."""

    lr: Annotated[float, POSITIVE] = 1.0

    def init(self, vector: Vector) -> dict[str, Any]:
        """Nothing."""
        return {}

    def step(self, state: State, vector: Vector, total: Vector, count: float) -> State:
        """The step, in place."""
        add_scaled(vector, self.lr / count, total)
        return state


@dataclass(frozen=True)
class Momentum(Sgd):
    """m <- momentum m + D, w <- w + lr m, where m is `moment`, empty without momentum."""

    momentum: Annotated[float, LESS_THAN_ONE] = 0.9

    def init(self, vector: Vector) -> dict[str, Any]:
        """No direction yet."""
        return {"moment": np.zeros_like(vector) if self.momentum else np.empty(0, vector.dtype)}

    def step(self, state: State, vector: Vector, total: Vector, count: float) -> State:
        """The step, in place."""
        if not self.momentum:
            return super().step(state, vector, total, count)
        np.multiply(state.moment, vector.dtype.type(self.momentum), out=state.moment)
        add_scaled(state.moment, 1.0 / count, total)
        return self.along(state, vector, total, count)

    def along(self, state: State, vector: Vector, total: Vector, count: float) -> State:
        """The model moved along the new direction."""
        return super().step(state, vector, state.moment, 1.0)


@dataclass(frozen=True)
class Nesterov(Momentum):
    """m <- momentum m + D, w <- w + lr (D + momentum m): a step that looks ahead."""

    def along(self, state: State, vector: Vector, total: Vector, count: float) -> State:
        """The model moved along the new direction, as it will be after the next step."""
        add_scaled(vector, self.lr / count, total)
        add_scaled(vector, self.lr * self.momentum, state.moment)
        return state


@dataclass(frozen=True)
class Adam(Sgd):
    """Each coordinate by its own mean and mean square, `moment` and `second`.

    A mean whose square is no number counts as the longest whose square is one: `second` never gets rid of an
    infinity, and its weight would stand still for good.

    `decayed`: mu^t and b2^t, float64, shape (2, 1); (2, size) where some coordinates have had fewer steps. As
    products, since powers come out in other bits on other machines.
    """

    momentum: Annotated[float, LESS_THAN_ONE] = 0.9
    beta2: Annotated[float, LESS_THAN_ONE] = 0.99
    eps: Annotated[float, POSITIVE] = 1e-8

    def init(self, vector: Vector) -> dict[str, Any]:
        """No step yet."""
        return {
            "moment": np.zeros_like(vector),
            "second": np.zeros_like(vector),
            "decayed": np.ones((2, 1)),
        }

    def step(self, state: State, vector: Vector, total: Vector, count: float) -> State:
        """The step, in place."""
        kind, decays = vector.dtype.type, np.array([[self.momentum], [self.beta2]])
        total = _bounded(total, count, vector.dtype)
        np.multiply(state.decayed, decays, out=state.decayed)
        np.multiply(state.moment, kind(self.momentum), out=state.moment)
        add_scaled(state.moment, (1.0 - self.momentum) / count, total)
        np.multiply(state.second, kind(self.beta2), out=state.second)
        self._add_squares(state.second, total, count)
        grown = (1.0 - state.decayed).astype(vector.dtype)
        length = np.sqrt(self.squares(state) / grown[1])
        length += kind(self.eps)
        add_scaled(vector, self.rate(state), state.moment / grown[0] / length)
        return state

    def _add_squares(self, second: Vector, total: Vector, count: float) -> None:
        """(1 - b2) D^2, of the undivided sum where its squares are numbers, as they are unless it is huge."""
        with np.errstate(over="ignore"):
            squares = np.square(total)
        huge = np.flatnonzero(np.isinf(squares))
        squares[huge] = 0
        add_scaled(second, (1.0 - self.beta2) / count**2, squares)
        second[huge] += (1.0 - self.beta2) * np.square(total[huge].astype(np.float64) / count)

    def rate(self, state: State) -> float:
        """The learning rate of this step."""
        return self.lr

    def squares(self, state: State) -> Vector:
        """By what the step of each coordinate is divided, squared and not corrected for its start yet."""
        squares: Vector = state.second
        return squares


@dataclass(frozen=True)
class ScheduleFree(Sgd):
    """Devices train between the points that take the steps and the mean of these, to which `moment` leads.

    `steps`: t, shape (1,), or (size,) where some coordinates have had fewer.
    """

    momentum: Annotated[float, LESS_THAN_ONE] = 0.9

    def init(self, vector: Vector) -> dict[str, Any]:
        """No step yet."""
        return {"moment": np.zeros_like(vector), "steps": np.zeros(1)}

    def step(self, state: State, vector: Vector, total: Vector, count: float) -> State:
        """The step, in place."""
        np.add(state.steps, 1.0, out=state.steps)
        add_scaled(state.moment, self.lr / count, total)
        add_scaled(vector, self.lr * (1.0 - self.momentum) / count, total)
        vector += (self.momentum / state.steps).astype(vector.dtype) * state.moment
        np.multiply(state.moment, (1.0 - 1.0 / state.steps).astype(vector.dtype), out=state.moment)
        return state


OPTIMISERS: dict[str, type[Sgd]] = {
    "sgd": Sgd,
    "momentum": Momentum,
    "nesterov": Nesterov,
    "adam": Adam,
    "schedule_free": ScheduleFree,
}


def _bounded(total: Vector, count: float, kind: np.dtype[Any]) -> Vector:
    """A sum, shape (size,), of which no mean has a square that is none of `kind`, corrected for its start."""
    longest = 0.99 * math.sqrt(np.finfo(kind).max) * count  # what is left is for roundings
    if max(total.max(initial=0.0), -total.min(initial=0.0)) <= longest:
        return total
    bounded: Vector = np.clip(total, -longest, longest)
    return bounded


def make_outer(params: Mapping[str, Any]) -> Optimiser:
    """The optimiser of a table such as `{name = "nesterov", lr = 0.7}`; of an empty one plain SGD.

    Raises `ConfigError`, naming the key.
    """
    values = dict(params)
    name = values.pop("name", "" if values else "sgd")
    if name not in OPTIMISERS:
        raise ConfigError(f"{OUTER}.name must be one of {', '.join(OPTIMISERS)}, not {name!r}")
    optimiser = build(OPTIMISERS[name], values, OUTER)
    check_parameters(optimiser, OUTER)
    return optimiser


def outer_in_place(strategy: Any, own: Mapping[str, str], otherwise: Optimiser) -> Optimiser:
    """That of the strategy's parameter `outer`; without one `otherwise`, of its parameters `own`.

    `own`: what each of them is called inside `outer`. Raises `ConfigError` where both are set.
    """
    if not strategy.outer:
        return otherwise
    for key, inside in own.items():
        if getattr(strategy, key) != getattr(type(strategy), key):
            raise ConfigError(
                f"strategy.{key} and strategy.outer are both set: "
                f"leave {key} out, and write {inside} into outer"
            )
    return make_outer(strategy.outer)


def stepped(
    optimiser: Optimiser, state: State, vector: Vector, total: Vector, count: float, at: slice | Indices
) -> State:
    """An optimiser's step on the coordinates `at`: of the others vector and state stay as they are."""
    if isinstance(at, slice):
        return optimiser.step(state, vector, total, count)
    remembered = [name for name, value in optimiser.init(vector).items() if getattr(value, "size", 0)]
    if not remembered:
        return optimiser.step(state, vector, total, count)
    whole = {name: _of_every(getattr(state, name), vector.size) for name in remembered}
    part = vector[at]
    own = replace(state, **{name: array[..., at] for name, array in whole.items()})
    own = optimiser.step(own, part, total[at], count)
    vector[at] = part
    for name, array in whole.items():
        array[..., at] = getattr(own, name)
    return replace(own, **whole)


def _of_every(array: Vector, size: int) -> Vector:
    """One that has a value of each coordinate, where it had one of all."""
    return array if array.shape[-1] == size else np.broadcast_to(array, (*array.shape[:-1], size)).copy()
