"""Builders for tests of the pure machines: events are lists, time is arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from anabranch.core import events as ev
from anabranch.core.effects import Decided, Effect
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.invariants import violations
from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.submodels import Coordinates, Submodel
from anabranch.core.model.updates import Ask, Capability, Decision, Update
from anabranch.strategies.registry import make_strategy
from anabranch.support.shelf import MemoryRows, RowShelf

SPEC = ParamSpec.of({"w": np.zeros(4, np.float32)})


def vector(*values: float) -> Vector:
    """A float32 vector."""
    return np.asarray(values, np.float32)


class Bench:
    """An engine under test: short verbs, and every invariant checked after every event."""

    def __init__(self, strategy: str = "fedbuff", start: Vector | None = None, **options: Any) -> None:
        settings = {k: options.pop(k) for k in list(options) if k in EngineSettings.__dataclass_fields__}
        robust = RobustTable(**options.pop("robust", {}))
        self.engine = Engine(
            SPEC,
            make_strategy(strategy, options, robust),
            EngineSettings(**settings),
            vector(0, 0, 0, 0) if start is None else start,
            shelf=RowShelf(MemoryRows()),
        )
        self.log: list[ev.Event] = []

    def do(self, event: ev.Event) -> list[Any]:
        """One event."""
        effects = self.engine.handle(event)
        self.log.append(event)
        assert violations(self.engine) == []
        return effects

    def enrol(self, *clients: str, now: float = 0.0) -> None:
        """Make clients known."""
        for client in clients:
            self.do(ev.Enrolled(now, client, Capability()))

    def ask(self, client: str, task: str, now: float = 0.0) -> list[Any]:
        """Apply for a task."""
        return self.do(ev.TaskAsked(now, Ask(client, task)))

    def push(
        self,
        client: str,
        task: str,
        delta: Iterable[float] = (1, 1, 1, 1),
        base: int | None = None,
        now: float = 1.0,
        update_id: str = "",
        **more: Any,
    ) -> list[Any]:
        """Send the result of a task."""
        open_task = self.engine.ledger.tasks.get(task)
        base = base if base is not None else (open_task.base_version if open_task else 0)
        flaw = more.pop("flaw", "")
        update = Update(
            update_id=update_id or f"update-of-{task}",
            task_id=task,
            client_id=client,
            base_version=base,
            examples=more.pop("examples", 1),
            delta=vector(*delta),
            submodel=more.pop("submodel", None),
            local_steps=more.pop("local_steps", 0),
            metrics=more.pop("metrics", {}),
        )
        payload = more.pop("payload", None) or ev.Payload("00" * 32, 4 * update.delta.size)
        return self.do(ev.UpdateArrived(now, update, payload, flaw))

    def tick(self, now: float) -> list[Any]:
        """Let time pass."""
        return self.do(ev.Ticked(now))

    def work(
        self, client: str, task: str, delta: Iterable[float] = (1, 1, 1, 1), now: float = 0.0
    ) -> Decision:
        """Ask, train in no time, push; returns the decision."""
        self.ask(client, task, now)
        return decision(self.push(client, task, delta, now=now))


def decision(effects: list[Effect]) -> Decision:
    """The decision among the effects."""
    return next(e for e in effects if isinstance(e, Decided)).receipt.decision


def part(*indices: int) -> Submodel:
    """A sub-model of these coordinates."""
    return Coordinates(np.asarray(indices, np.int64))
