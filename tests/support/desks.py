"""A run without a network: the books of the server, its store and engine, devices of a few lines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.effects import Decided, Effect, Granted
from anabranch.core.errors import StoreError
from anabranch.core.limits import Limits
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Ask, Capability, Task, Update
from anabranch.core.retention import Keep
from anabranch.core.snapshot import state_digest
from anabranch.host.build import Blueprint
from anabranch.server.app import every_of
from anabranch.server.books import Books, Call
from anabranch.server.manifest import Manifest, keep_manifest, kept_manifest
from anabranch.server.models import Models
from anabranch.server.recovery import Recovered, recover, refolder
from anabranch.server.store.base import Store

TENSORS = {"w": np.zeros(8, np.float32)}
LIMITS = Limits(free_disk_bytes_min=0)


def settings(**tables: Mapping[str, Any]) -> Config:
    """FedBuff of two updates, and what a test wants else."""
    strategy = {"name": "fedbuff", "buffer_size": 2}
    return merge([("default", {"strategy": strategy}), ("test", tables)])


class Desk:
    """Books over a store; `now` is a second later at every event. To open it again is to recover."""

    def __init__(self, store: Store, data_dir: Path, config: Config, limits: Limits = LIMITS) -> None:
        self.store, self.config, self.limits = store, config, limits
        manifest = Manifest("test", ParamSpec.of(TENSORS), TENSORS)
        self.found: Recovered = recover(store, config, manifest, limits)
        keep_manifest(kept_manifest(data_dir), manifest)
        engine = self.found.engine
        self.models = Models(data_dir / "models", engine.spec, {})
        place = (self.found.seq, self.found.saved, self.found.history)
        self.books = Books(
            engine, store, self.models, every_of(config), *place, limits, Keep.of(config.server.keep)
        )
        self.books.refold = refolder(
            store, partial(Blueprint.of(config, manifest.spec, limits).engine, manifest.tensors)
        )
        self.now = self.found.last_now

    @property
    def digest(self) -> str:
        return state_digest(self.books.engine)

    def close(self) -> None:
        """As a server is stopped, with a last snapshot."""
        self.books.flush(self.now)
        self.drop()

    def drop(self) -> None:
        """As a server is killed: what was not committed is gone."""
        self.models.close()
        self.store.close()

    def tell(self, *events: ev.Event, inline: bytes | None = None) -> list[Effect]:
        """Commit events as one batch; what came of the last one."""
        calls = [Call(event, inline) for event in events]
        self.books.commit(calls)
        for call in calls:
            if call.error is not None:
                raise call.error
        return calls[-1].effects

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def enrol(self, client: str, **capability: Any) -> None:
        self.tell(ev.Enrolled(self.tick(), client, Capability(**capability)))

    def ask(self, client: str, task_id: str) -> Task:
        (granted,) = [
            e for e in self.tell(ev.TaskAsked(self.tick(), Ask(client, task_id))) if isinstance(e, Granted)
        ]
        return granted.task

    def push(self, task: Task, value: float, update_id: str = "") -> Decided:
        """Answer a task with eight equal values."""
        event, data = self.answer(task, value, update_id)
        return next(e for e in self.tell(event, inline=data) if isinstance(e, Decided))

    def answer(self, task: Task, value: float, update_id: str = "") -> tuple[ev.UpdateArrived, bytes]:
        """An update of eight equal values, and its bytes."""
        delta = np.full(8, value, np.float32)
        data, spec = delta.tobytes(), self.books.engine.spec
        assert task.submodel is None
        payload = ev.Payload(hashlib.sha256(data).hexdigest(), len(data))
        update = Update(
            update_id=update_id or f"u-{task.task_id}",
            task_id=task.task_id,
            client_id=task.client_id,
            base_version=task.base_version,
            examples=3,
            delta=delta,
            local_steps=2,
        )
        assert spec.size == delta.size
        return ev.UpdateArrived(self.tick(), update, payload), data

    def work(self, rounds: int, clients: int = 3, first: int = 0) -> None:
        """Devices that enrol, ask and push in turn, each update with values of its own."""
        for number in range(first, first + rounds):
            client = f"c{number % clients}"
            if client not in self.books.engine.ledger.clients:
                self.enrol(client)
            self.push(self.ask(client, f"t{number}"), 1e-3 * (number % 997))

    def busy(self, updates: int, first: int = 0) -> None:
        """Updates, with a snapshot whenever one is due, however long the last one took."""
        for number in range(first, first + updates):
            self.books.saving._not_before = float("-inf")
            self.work(1, first=number)


def failing(store: Store, error: StoreError) -> None:
    """The next snapshot of a store fails before anything of it is named."""
    whole = store.save_snapshot

    def fail(*_: Any, **__: Any) -> None:
        store.save_snapshot = whole  # type: ignore[method-assign]
        raise error

    store.save_snapshot = fail  # type: ignore[method-assign]
