"""Buffers: float tensors of a model that no optimizer trains, such as the running statistics of a BatchNorm.

What is right for weights is wrong for them: two devices that both find a variance to be 0.9 too large have
not found it to be 1.8 too large, and a variance below zero is no number any more after the square root. So
the model's spec names its buffers, an update has the values that they *reached* in the place of differences,
and `[model] buffers` says what becomes of those, whatever the strategy:

| policy  | a buffer of the next version                                                               |
|---------|--------------------------------------------------------------------------------------------|
| average | what the strategy makes of it, within the current value and those reached: see below       |
| latest  | the value that the newest update has reached                                               |
| local   | as the run started; each device keeps its own, which never travel (FedBN)                  |

| symbol | meaning                                                               |
|--------|-----------------------------------------------------------------------|
| b      | a buffer's value at the server                                        |
| r_i    | the value that device i has reached                                   |
| d_i    | what the strategy gets as the device's difference                     |

    d_i = r_i - w_base      for strategies that mix models (they compute w_base + d_i)
    d_i = r_i - b           for those that add differences up
    b <- min(max(b', min(b, r_1, ...)), max(b, r_1, ...))      b' by the strategy, r_i since the last version

So a buffer is a convex combination of values that somebody had, under every strategy, staleness, momentum and
server learning rate. FedBN: Li et al., ICLR 2021, arXiv 2102.07623; it is of the whole norms, here the
weights of a norm are averaged like all weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from anabranch.core.model.arrays import from_bytes, to_bytes
from anabranch.core.model.params import Delta, Indices, ParamSpec, SparseVector, Tensors, Vector
from anabranch.core.model.submodels import Coordinates, Submodel
from anabranch.core.model.updates import Update

AVERAGE, LATEST, LOCAL = "average", "latest", "local"


@dataclass(frozen=True, eq=False)
class Covered:
    """The buffers in what a task covers: `at` (k,) in its coordinates, `which` (k,) among all buffers."""

    at: Indices
    which: Indices

    @classmethod
    def of(cls, spec: ParamSpec, submodel: Submodel | None) -> Covered:
        """Of a sub-model, or of the whole model."""
        places = spec.buffer_places
        if submodel is None:
            return cls(places, np.arange(places.size))
        if not isinstance(submodel, Coordinates):
            at, covered = submodel.covered(spec.buffers)
            return cls(at, np.searchsorted(places, covered))
        found = np.searchsorted(submodel.indices, places)
        found[found == submodel.size] = 0
        which = np.flatnonzero(submodel.indices[found] == places)
        return cls(found[which], which)


@dataclass(frozen=True, eq=False)
class Bounds:
    """What the next values of the buffers are within, each (buffers,). Never written to."""

    low: Vector
    high: Vector


class Buffers:
    """The server's side of it. `bounds` is all that changes, by the engine alone, and what a snapshot has.

    All is empty for a model without buffers.
    """

    def __init__(self, spec: ParamSpec, policy: str, vector: Vector) -> None:
        self._spec, self._policy = spec, policy
        self.bounds = self._around(vector)

    def __bool__(self) -> bool:
        return self.bounds.low.size > 0

    def given(
        self, update: Update, vector: Vector, base: Vector | None
    ) -> tuple[Update, ReachedBuffers | None]:
        """An update as a strategy gets it, and what it has reached; None where that does not count.

        `base`: w_base for strategies that mix models.
        """
        covered = Covered.of(self._spec, update.submodel)
        if self._policy == LOCAL:
            return replace(update, delta=_with(update.delta, covered.at, np.zeros(covered.at.size))), None
        values = _at(update.delta, covered.at)
        before = (vector if base is None else base)[self._spec.buffer_places[covered.which]]
        delta = _with(update.delta, covered.at, values - before)
        return replace(update, delta=delta), ReachedBuffers(covered, values)

    def count(self, reached: ReachedBuffers | None) -> None:
        """An update was taken that has reached these values."""
        if reached is None:
            return
        which, values = reached.covered.which, reached.values
        low, high = self.bounds.low.copy(), self.bounds.high.copy()
        keeps = self._policy == AVERAGE
        low[which] = np.minimum(low[which], values) if keeps else values
        high[which] = np.maximum(high[which], values) if keeps else values
        self.bounds = Bounds(low, high)

    def publish(self, vector: Vector) -> None:
        """Bring a new version's buffers within what there was, in place."""
        places = self._spec.buffer_places
        vector[places] = np.fmin(np.fmax(vector[places], self.bounds.low), self.bounds.high)
        self.bounds = self._around(vector)

    def _around(self, vector: Vector) -> Bounds:
        """Those of a version's own values: no update has come since."""
        values = vector[self._spec.buffer_places]
        return Bounds(values, values)


@dataclass(frozen=True, eq=False)
class ReachedBuffers:
    """The values, (k,), that an update has reached of the buffers that it covers."""

    covered: Covered
    values: Vector


@dataclass(frozen=True, eq=False)
class DeviceBuffers:
    """A device's side of it: of one model under one policy.

    `own`: what the device keeps under `local`, the bytes of all buffers' values, NaN where it has none yet;
    b"" at first, and always under the other policies.
    """

    spec: ParamSpec
    policy: str = AVERAGE

    def start(self, vector: Vector, submodel: Submodel | None, own: bytes) -> Vector:
        """What a training starts from, for the server's `vector`, (covered coordinates,)."""
        if not own:
            return vector
        covered = Covered.of(self.spec, submodel)
        kept = self._kept(own)[covered.which]
        found = vector.copy()
        found[covered.at] = np.where(np.isnan(kept), found[covered.at], kept)
        return found

    def told(
        self, start: Vector, delta: Vector, submodel: Submodel | None, own: bytes
    ) -> tuple[Vector, bytes]:
        """What the server is told of a training from `start` by `delta`, and `own` after it."""
        if not self.spec.buffers:
            return delta, own
        covered = Covered.of(self.spec, submodel)
        if not covered.at.size:
            return delta, own
        reached = start[covered.at] + delta[covered.at]
        found = delta.copy()
        if self.policy != LOCAL:
            found[covered.at] = reached
            return found, own
        found[covered.at] = 0
        kept = self._kept(own)
        kept[covered.which] = reached
        return found, bytes(to_bytes(kept))

    def _kept(self, own: bytes) -> Vector:
        size, dtype = self.spec.buffer_places.size, self.spec.vector_dtype
        if not own:
            return np.full(size, np.nan, dtype)
        return from_bytes(own, dtype.name, (size,))


def matching(tensors: Tensors, patterns: Iterable[str]) -> tuple[str, ...]:
    """The float tensors whose names a pattern fits: for models that do not say what their tensors are."""
    patterns = list(patterns)
    floats = (name for name, array in tensors.items() if array.dtype.kind == "f")
    return tuple(name for name in floats if any(fnmatchcase(name, pattern) for pattern in patterns))


def policy_of(config: Mapping[str, Any]) -> str:
    """That of a run, from the tables that a device may read."""
    return str(config.get("model", {}).get("buffers", AVERAGE))


def _at(delta: Delta, at: Indices) -> Vector:
    """The values of some coordinates."""
    if not isinstance(delta, SparseVector):
        return delta[at]
    found = np.zeros(at.size, delta.values.dtype)
    inside = np.isin(delta.indices, at)
    found[np.searchsorted(at, delta.indices[inside])] = delta.values[inside]
    return found


def _with(delta: Delta, at: Indices, values: Vector) -> Delta:
    """A copy with other values at some coordinates, which it then all has."""
    if not isinstance(delta, SparseVector):
        found = delta.copy()
        found[at] = values
        return found
    others = ~np.isin(delta.indices, at)
    return SparseVector(
        np.concatenate([delta.indices[others], at]),
        np.concatenate([delta.values[others], values.astype(delta.values.dtype, copy=False)]),
        delta.size,
    )
