"""A server machine with a downlink, and devices that follow it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.compress.broadcast import make_broadcast
from anabranch.compress.downloads import Download, Downloads, apply_download
from anabranch.core import events as ev
from anabranch.core.effects import Granted
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.model.params import ParamSpec, Vector, digest
from anabranch.core.model.updates import Ask, Capability, Task, Update
from anabranch.strategies.registry import make_strategy

Held = tuple[int, Vector]


def tensors(dtype: type[np.floating[Any]] = np.float32) -> dict[str, npt.NDArray[Any]]:
    """Two large tensors, two small ones, and a frozen counter."""
    rng = np.random.default_rng(7)
    return {
        "first": rng.normal(0, 0.1, (40, 50)).astype(dtype),
        "first_bias": rng.normal(0, 0.1, 40).astype(dtype),
        "steps": np.array(12, np.int64),
        "second": rng.normal(0, 0.1, (10, 40)).astype(dtype),
        "second_bias": rng.normal(0, 0.1, 10).astype(dtype),
    }


SPEC = ParamSpec.of(tensors())
WIDE = ParamSpec.of(tensors(np.float64))


def motion(count: int, size: int = SPEC.size, scale: float = 1e-3, seed: int = 0) -> list[Vector]:
    """Moves of a model that trains, (size,) each: half of one is its trend, half is noise."""
    rng = np.random.default_rng(seed)
    trend = rng.laplace(0, scale, size)
    return [(trend + rng.laplace(0, scale, size)).astype(np.float32) for _ in range(count)]


class Run:
    """An engine that publishes every update, its payloads, and the journal."""

    def __init__(
        self,
        codec: str = "log",
        strategy: str = "fedbuff",
        spec: ParamSpec = SPEC,
        start: Vector | None = None,
        **params: Any,
    ) -> None:
        self.spec = spec
        self.frozen = spec.frozen(tensors())
        if strategy == "fedbuff":
            params = {"buffer_size": 1, **params}
        self.strategy = make_strategy(strategy, params)
        self.settings = EngineSettings(concurrency=0, tasks_per_client=10_000)
        self.start = spec.flatten(tensors(spec.vector_dtype.type)) if start is None else start
        self.codec = codec
        self.engine = self.fresh()
        self.downloads = Downloads(spec, self.frozen)
        self.events: list[ev.Event] = []
        self.deltas: dict[str, Vector] = {}
        self._numbers = itertools.count()
        self.do(ev.Enrolled(0.0, "a", Capability()))

    def fresh(self) -> Engine:
        """An engine at version 0."""
        broadcast = make_broadcast(self.spec, self.strategy, self.codec)
        return Engine(self.spec, self.strategy, self.settings, self.start, broadcast)

    def do(self, event: ev.Event) -> list[Any]:
        """One event."""
        self.events.append(event)
        return self.engine.handle(event)

    def ask(self) -> Task:
        """A task from the newest version."""
        (granted,) = self.do(ev.TaskAsked(0.0, Ask("a", f"t{next(self._numbers)}")))
        assert isinstance(granted, Granted)
        return granted.task

    def push(self, task: Task, delta: Vector) -> list[Any]:
        """The result of a task."""
        delta = delta.astype(self.spec.vector_dtype)
        update = Update(
            update_id=f"u-{task.task_id}",
            task_id=task.task_id,
            client_id="a",
            base_version=task.base_version,
            examples=1,
            delta=delta,
        )
        payload = ev.Payload(digest(delta), delta.nbytes)
        self.deltas[payload.sha256] = delta
        return self.do(ev.UpdateArrived(0.0, update, payload, ""))

    def publish(self, *deltas: Vector) -> None:
        """One version for each."""
        for delta in deltas:
            self.push(self.ask(), delta)

    def download(self, holds: int | None, codecs: tuple[str, ...] | None = None) -> Download:
        """The newest version for a device that holds another."""
        make = self.downloads.offer(self.engine, self.engine.version, holds, codecs)
        assert make is not None, "the newest version is always there"
        return make()

    def fetch(self, held: Held | None, codecs: tuple[str, ...] | None = None) -> Held:
        """What a device has after its download; its digest is checked."""
        got = self.download(None if held is None else held[0], codecs)
        vector, _ = apply_download(self.spec, got.codec, got.data, got.from_version, held)
        assert got.vector_sha256 in ("", digest(vector))
        return got.version, vector

    def replica(self, version: int) -> Vector | None:
        """What the engine takes for the base of a version."""
        assert self.engine.broadcast is not None
        return self.engine.broadcast.replica(self.engine.broadcast_state, version)
