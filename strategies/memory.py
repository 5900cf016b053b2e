"""Strategies that remember the newest update of each device.

| symbol | name        | meaning                                                       |
|--------|-------------|---------------------------------------------------------------|
| h_i    | state.kept  | the newest update of device i that was taken; none: h_i = 0   |
| H      | state.total | a sum of h_i; float64: of one that left only the rounding     |

Updates are added to H and taken from it again, which rounds: of one that has left up to 2^-53 of its length
stays each time. Beside updates of a like length that is nothing; after one that was 10^17 times longer it is
more than all of them, for good. `robust.clip` takes no such update in.

The memory is part of the state: it is there after a restart, a replay comes to it again, and a rollback makes
it of the updates that count. `memory` says where the numbers lie.

"ram": in the state. So every snapshot has them, and a copy of them is made for each: n devices and a model of
P numbers take 4 n P bytes and, while a snapshot is written, as many again.

"disk": on a shelf (`core/engine/shelf.py`), and the state has a reference of a hundred bytes in the place of
each. What lies there is the very vector that the strategy was given, and not the payload that it came as,
though the log has that, 10 to 40 times smaller where it is compressed. What an update is to a strategy comes
of more than its bytes: a length that was bounded by what others had sent, buffers as differences from the
model as it was. And the log may drop a payload long before its device comes again.

What this takes of the server's memory is bounded by `memory_bytes_max`: of a device its numbers and its name,
or its name and a reference. A run whose fleet does not fit does not begin; where more devices come than fit,
those that have a place go on, and the others get no task. A place is taken by a device's first update that
counts, and kept to the end of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from anabranch.core.engine.shelf import Remembered, Shelved
from anabranch.core.engine.strategy import Context, Refusal, State
from anabranch.core.errors import ConfigError
from anabranch.core.limits import KIB, MIB
from anabranch.core.model.params import Delta, ParamSpec, SparseVector, Vector
from anabranch.core.model.updates import Ask, Reason, Update
from anabranch.strategies.composition import ComposedStrategy

MEMORY_BYTES_MAX = 256 * MIB
PLACE_BYTES = KIB  # of a device beside its numbers: its name and a reference, in the state and in a snapshot
RAM, DISK = PLACES = ("ram", "disk")


@dataclass(frozen=True, eq=False)
class Kept:
    """What is remembered of a device. An empty `delta` is one that counts no more."""

    delta: Remembered
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
    def memory(self) -> str:
        """Where the numbers lie: `RAM` or `DISK`."""
        return RAM

    @property
    def memory_bytes_max(self) -> int:
        """Bytes that all of it may take of the server's memory."""
        return MEMORY_BYTES_MAX

    def check_fleet(self, spec: ParamSpec, clients: int) -> None:
        """Raises `ConfigError`, with what it takes, unless updates of so many devices fit."""
        takes = clients * self._place_bytes(spec)
        if takes > self.memory_bytes_max:
            raise ConfigError(
                f"strategy.memory_bytes_max is {self.memory_bytes_max}, but the updates of "
                f"fleet.clients = {clients} devices, of {spec.size} numbers each, which {self.name!r} "
                f"remembers, take {takes} of memory: {self._remedy}, or take a strategy that remembers none, "
                "such as 'fedbuff' or 'fadas'"
            )

    def admit(self, state: State, ask: Ask, context: Context) -> Refusal | None:
        """Those that have a place in the memory, and as many more as there is room for."""
        return self._full(state, ask.client_id, context)

    def refuse_in(self, state: State, update: Update, context: Context) -> Refusal | None:
        """Those as well for which the last place has gone while the device trained."""
        return self._full(state, update.client_id, context) or super().refuse_in(state, update, context)

    def _full(self, state: State, client_id: str, context: Context) -> Refusal | None:
        assert context.spec is not None, "a run has a model"
        room = self.memory_bytes_max // self._place_bytes(context.spec)
        if client_id in state.kept or len(state.kept) < room:
            return None
        detail = f"strategy.memory_bytes_max has room for the updates of {room} devices, which are there"
        return Refusal(Reason.NOT_SELECTED, detail)

    @property
    def _remedy(self) -> str:
        more = "set it to that where so much memory is free"
        if self.memory == DISK:
            return more
        return f"set strategy.memory = 'disk', or {more} twice"

    def _place_bytes(self, spec: ParamSpec) -> int:
        numbers = 0 if self.memory == DISK else spec.size * spec.vector_dtype.itemsize
        return numbers + PLACE_BYTES

    def with_newest(self, kept: dict[str, Kept], update: Update, context: Context) -> dict[str, Kept]:
        """The memory with an update in the place of its device's last one, on the shelf if that is for it.

        It is written to: a copy for each update would take as long as there are devices.
        """
        delta, shelf = _compact(update.delta), context.shelf if self.memory == DISK else None
        kept[update.client_id] = Kept(delta if shelf is None else shelf.put(delta), update.base_version)
        return kept


def last_delta(kept: Kept, context: Context) -> Delta:
    """The numbers of what is remembered, to be read."""
    if not isinstance(kept.delta, Shelved):
        return kept.delta
    assert context.shelf is not None, "what lies on a shelf was put there"
    return context.shelf.take(kept.delta)


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
