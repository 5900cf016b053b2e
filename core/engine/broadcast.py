"""What devices hold of a published version, where that is not the server's vector to the bit.

A lossy downlink makes two models of one version: the server's vector w_v and its *replica* p_v, the
one that every device decodes and trains from. Deltas are against p_v. Replicas are a function of the
versions published so far, so the engine owns their state, and a replay has the same ones.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Protocol

from anabranch.core.model.params import Vector

BroadcastState = Any


class Broadcast(Protocol):
    """A lossy downlink. Pure; the state is data, like a strategy's, and never written in place."""

    state_type: ClassVar[type[Any]]

    def init(self, vector: Vector) -> BroadcastState:
        """The state at version 0. The vector, shape (size,), is read and not kept."""
        ...

    def publish(
        self, state: BroadcastState, version: int, vector: Vector, needed: Collection[int]
    ) -> BroadcastState:
        """The state once `vector` is `version`; `needed` names the older versions that tasks train from.

        A downlink may leave a version out.
        """
        ...

    def restart(
        self, state: BroadcastState, version: int, vector: Vector, needed: Collection[int]
    ) -> BroadcastState:
        """The same for a vector that is far from the last: the replica is as near to it as at version 0."""
        ...

    def offered(self, state: BroadcastState, version: int) -> int:
        """The newest version that devices get, where the server's own is `version`."""
        ...

    def replica(self, state: BroadcastState, version: int) -> Vector | None:
        """p_v, shape (size,), for reading; None where it cannot be rebuilt any more."""
        ...
