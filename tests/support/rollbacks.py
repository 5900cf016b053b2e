"""An engine with its whole log, which can be rolled back, and clients that push by a script."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st
from machines import SPEC, vector

from anabranch.compress.broadcast import make_broadcast
from anabranch.core import events as ev
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.journal import Record, from_record, to_record
from anabranch.core.model.params import ParamSpec, digest
from anabranch.core.model.updates import Ask, Capability
from anabranch.host.log import WholeLog
from anabranch.host.rollback import Refolder
from anabranch.host.submission import loader
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.submodels.asyncdrop import HeteroWindows
from anabranch.support.shelf import MemoryRows, RowShelf
from anabranch.testing.models import GROUPS, tensors

CLIENTS = "abcd"
BUFFERED = ParamSpec.of(
    {"weight": np.zeros(2, np.float32), "seen": np.zeros(2, np.float32)}, buffers=("seen",)
)
Script = list[tuple[str, int, float]]  # client, how many other events its training lasts, value


class World:
    """An engine with its log, and clients whose values do not depend on what they fetch.

    With `units` tasks are of sub-models, chosen by what has changed and what was not touched for long. With
    `buffers`, a policy, half of the model is buffers.
    """

    def __init__(
        self,
        strategy: str,
        params: dict[str, Any],
        robust: dict[str, Any],
        units: bool = False,
        downlink: str = "raw",
        buffers: str = "",
        **settings: Any,
    ) -> None:
        self.make = (strategy, params, robust)
        self.spec = ParamSpec.of(tensors(), GROUPS) if units else SPEC
        if buffers:
            self.spec, settings = BUFFERED, {**settings, "buffers": buffers}
        self.units, self.downlink = units, downlink
        self.settings = EngineSettings(**{"clip": 3.0, **settings})
        self.log: list[tuple[int, Record]] = []
        self.payloads: dict[str, bytes] = {}
        self.shelf = RowShelf(MemoryRows())
        self.engine = self.fresh()
        self.refold = Refolder(WholeLog(self.records, self.payload), lambda _: self.fresh())
        self.load = loader(self.payload, self.spec)

    def fresh(self) -> Engine:
        name, params, robust = self.make
        table = RobustTable(**robust)
        strategy, zeros = make_strategy(name, params, table), np.zeros(self.spec.size, np.float32)
        broadcast = make_broadcast(self.spec, strategy, self.downlink)
        planner = HeteroWindows(self.spec, 0.5, coverage_versions=3) if self.units else None
        return Engine(self.spec, strategy, self.settings, zeros, broadcast, planner, shelf=self.shelf)

    def records(self, after: int = 0) -> Iterator[tuple[int, Record]]:
        return iter(json.loads(json.dumps(self.log[after:])))

    def payload(self, reference: ev.Payload) -> bytes:
        return self.payloads[reference.sha256]

    def do(self, event: ev.Event) -> list[Any]:
        self.log.append((len(self.log) + 1, to_record(event)))
        return self.engine.handle(event)

    def push(self, task_id: str, client: str, value: float, now: float, flaw: str = "") -> list[Any]:
        task = self.engine.ledger.tasks[task_id]
        size = self.spec.size if task.submodel is None else task.submodel.size
        delta = np.resize(vector(value, -value, 0.5 * value, value * value), size)
        sha256 = hashlib.sha256(delta.tobytes()).hexdigest()
        self.payloads[sha256] = delta.tobytes()
        record = {
            "kind": "update",
            "now": now,
            "update_id": f"u-{task_id}",
            "task_id": task_id,
            "client_id": client,
            "base_version": task.base_version,
            "examples": 1 + len(task_id),
            "local_steps": 1,
            "metrics": {},
            "submodel": None if task.submodel is None else task.submodel.to_json(),
            "payload": {"sha256": sha256, "size_bytes": 16, "codec": "raw", "values": 0},
            "flaw": flaw,
        }
        return self.do(from_record(record, self.spec, self.load))

    def play(self, script: Script, hostile: str = "", first: int = 0) -> None:
        """Ask, and push some turns later; the updates of `hostile` from turn `first` on are flawed.

        What is not pushed in the end stays under way.
        """
        now, waiting = float(len(self.log)), []
        for turn, (client, lasts, value) in enumerate(script):
            now += 1.0
            if (deadline := self.engine.next_deadline()) is not None and deadline <= now:
                self.do(ev.Ticked(now))
            task_id = f"t{len(self.log)}-{turn}"
            ask = ask_of(client, task_id)
            if not self.engine.ledger.live_of(client) and not self.engine.refusal(ask, now):
                self.do(ev.TaskAsked(now, ask))
                waiting.append((turn + lasts, task_id, client, value))
            for due, task, who, its in sorted(waiting):
                if due <= turn:
                    waiting.remove((due, task, who, its))
                    if task not in self.engine.ledger.tasks:
                        continue  # its device was given up
                    flaw = "rejected on arrival" if who == hostile and turn >= first else ""
                    self.push(task, who, its, now, flaw)

    def enrol(self) -> None:
        for client in CLIENTS:
            self.do(ev.Enrolled(0.0, client, Capability()))

    def roll_back(self, to_version: int, to_seq: int, *without: str, everyone: bool = False) -> list[Any]:
        event = ev.RolledBack(1e4, to_version, to_seq, without, everyone)
        return self.do(self.refold(event, len(self.log) + 1, self.engine))


def ask_of(client: str, task_id: str) -> Ask:
    return Ask(client, task_id)


def at_version(world: World, version: int) -> tuple[int, str]:
    """The event that published a version and the digest of its model, by replaying the log."""
    fresh, seq = world.fresh(), 0
    log = world.records()
    while fresh.version < version:
        seq, record = next(log)
        fresh.handle(from_record(record, world.spec, world.load))
    return seq, digest(fresh.vector)


def seq_of_version(world: World, version: int) -> int:
    """The event that published a version."""
    return at_version(world, version)[0]


scripts = st.lists(
    st.tuples(st.sampled_from(CLIENTS), st.integers(0, 5), st.integers(-4, 4).map(float)),
    min_size=12,
    max_size=50,
)
