"""Strategies that remember the newest update of each device.

| symbol | name        | meaning                                                       |
|--------|-------------|---------------------------------------------------------------|
| h_i    | state.kept  | the newest update of device i that was taken; none: h_i = 0   |
| H      | state.total | a sum of h_i; float64, so that nothing stays of one that left |

The memory is part of the state: it is there after a restart, a replay comes to it again, and a rollback makes
it of the updates that count. So every snapshot has it, and a copy of it is made for each: n devices and a
model of P numbers take 4 n P bytes and, while a snapshot is written, as many again. That is bounded by
`memory_bytes_max`. A run whose fleet does not fit does not begin; where more devices come than fit, those
that have a place go on, and the others get no task. A place is taken by a device's first update that counts,
and kept to the end of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from anabranch.core.engine.strategy import Context, Refusal, State, Step, rejected
from anabranch.core.errors import ConfigError
from anabranch.core.limits import KIB, MIB
from anabranch.core.model.params import Delta, ParamSpec, SparseVector, Vector
from anabranch.core.model.updates import Ask, Reason, Update
from anabranch.strategies.composition import ComposedStrategy

MEMORY_BYTES_MAX = 256 * MIB
PLACE_BYTES = KIB  # of a device beside its numbers: its name, in the state and in a snapshot


@dataclass(frozen=True, eq=False)
class Kept:
    """What is remembered of a device. An empty `delta` is one that counts no more."""

    delta: Delta
    base_version: int

    @property
    def counts(self) -> bool:
        """Whether its values are there."""
        return self.delta.size > 0

    def emptied(self) -> Kept:
        """Without its values."""
        return replace(self, delta=np.empty(0))


class RememberingStrategy(ComposedStrategy):
    """Bounds the memory of a strategy whose state has `kept`, by the names of devices.

    See the module.
    """

    name: ClassVar[str]

    @property
    def memory_bytes_max(self) -> int:
        """Bytes of all updates that are remembered."""
        return MEMORY_BYTES_MAX

    def check_fleet(self, spec: ParamSpec, clients: int) -> None:
        """Raises `ConfigError`, with what it takes, unless updates of so many devices fit."""
        takes = clients * self._place_bytes(spec)
        if takes > self.memory_bytes_max:
            raise ConfigError(
                f"strategy.memory_bytes_max is {self.memory_bytes_max}, but the updates of "
                f"fleet.clients = {clients} devices, of {spec.size} numbers each, which {self.name!r} "
                f"remembers, take {takes}: set it to that where twice as much memory is free, or take a "
                "strategy without such a memory, such as 'fedbuff' or 'fadas'"
            )

    def admit(self, state: State, ask: Ask, context: Context) -> Refusal | None:
        """Those that have a place in the memory, and as many more as there is room for."""
        return self._full(state, ask.client_id, context)

    def step(self, state: State, vector: Vector, update: Update, context: Context) -> Step:
        """The parts, in their order, unless the last place has gone while the device trained."""
        full = self._full(state, update.client_id, context)
        if full is not None:
            return Step(state, None, rejected(context.staleness, full.reason, full.detail))
        return super().step(state, vector, update, context)

    def _full(self, state: State, client_id: str, context: Context) -> Refusal | None:
        assert context.spec is not None, "a run has a model"
        room = self.memory_bytes_max // self._place_bytes(context.spec)
        if client_id in state.kept or len(state.kept) < room:
            return None
        detail = f"strategy.memory_bytes_max has room for the updates of {room} devices, which are there"
        return Refusal(Reason.NOT_SELECTED, detail)

    def _place_bytes(self, spec: ParamSpec) -> int:
        return spec.size * spec.vector_dtype.itemsize + PLACE_BYTES


def with_newest(kept: Mapping[str, Kept], update: Update) -> dict[str, Kept]:
    """The memory with an update in the place of its device's last one."""
    return {**kept, update.client_id: Kept(_compact(update.delta), update.base_version)}


def _compact(delta: Delta) -> Delta:
    """A copy that is no larger than all numbers, however many of them a sparse one has."""
    if isinstance(delta, SparseVector):
        sparse_bytes = delta.indices.nbytes + delta.values.nbytes
        return delta if sparse_bytes < delta.size * delta.values.itemsize else delta.dense()
    return np.array(delta)


def no_total(vector: Vector) -> Vector:
    """H before the first update, shape (size,)."""
    return np.zeros(vector.size)


def shifted_kept(kept: Mapping[str, Kept], versions: int) -> dict[str, Kept]:
    """Other numbers for the versions that the updates started from."""
    return {client: replace(k, base_version=k.base_version + versions) for client, k in kept.items()}
