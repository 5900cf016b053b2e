"""Every version by itself, through a lossy chain: what TEASQ-Fed does, as far as it is known."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core.model.params import ParamSpec, Vector, dense
from anabranch.core.rng import seed_of
from anabranch.core.rules import NEWEST


@dataclass(frozen=True)
class DirectState:
    """The replicas that tasks train from, by version (as text); empty where no strategy asks for them."""

    replicas: dict[str, Vector] = field(default_factory=dict)


class DirectDownlink:
    """A `Broadcast`. `codec_at` gives the chain of a version; `keeps_replicas`: the strategy mixes models.

    `rules`: the run's (`core/rules.py`).
    """

    state_type: ClassVar[type[Any]] = DirectState

    def __init__(
        self, spec: ParamSpec, codec_at: Callable[[int], str], keeps_replicas: bool, rules: int = NEWEST
    ) -> None:
        self.spec, self.codec_at, self.keeps_replicas, self.rules = spec, codec_at, keeps_replicas, rules

    def init(self, vector: Vector) -> DirectState:
        """Version 0."""
        return self.publish(DirectState(), 0, vector, ())

    def first_replica(self, vector: Vector) -> Vector:
        """The decoded model of version 0, shape (size,)."""
        return self.decoded(0, self.encoded(0, vector))

    def publish(
        self, state: DirectState, version: int, vector: Vector, needed: Collection[int]
    ) -> DirectState:
        """The new replica, and those that tasks train from."""
        if not self.keeps_replicas:
            return state
        kept = {v: r for v, r in state.replicas.items() if int(v) in needed}
        return DirectState({**kept, str(version): self.decoded(version, self.encoded(version, vector))})

    def restart(
        self, state: DirectState, version: int, vector: Vector, needed: Collection[int]
    ) -> DirectState:
        """As ever: no version leans on another."""
        return self.publish(state, version, vector, needed)

    def offered(self, state: DirectState, version: int) -> int:  # noqa: ARG002 - each is encoded by itself
        """Every version."""
        return version

    def replica(self, state: DirectState, version: int) -> Vector | None:
        """The decoded model of a version, where it is kept."""
        return state.replicas.get(str(version))

    def encoded(self, version: int, vector: Vector) -> bytes:
        """The bytes of a version: the same whenever they are made."""
        codec = make_codec(self.codec_at(version), self.rules)
        return codec.encode(vector, Layout.of(self.spec), seed_of(version, "downlink"))

    def decoded(self, version: int, data: bytes | memoryview) -> Vector:
        """What a device makes of them, shape (size,)."""
        return dense(make_codec(self.codec_at(version)).decode(data, Layout.of(self.spec)))
