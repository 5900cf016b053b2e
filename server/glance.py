"""How a run stands, for the event loop: what the writer's thread shows of its engine after each batch.

The engine is that thread's alone, and changes under whoever else looks. A `Glance` never changes, whatever
is in it: two looks at one of them agree, and it has all that whoever was answered has heard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from anabranch.core.engine.changes import Changes
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.ledger import Counters, Touched
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.model.updates import Capability, Receipt, Task, TaskState
from anabranch.strategies.phased import Phased

V = TypeVar("V")
ABOVE_MIN = 64


class Layered(Generic[V]):
    """A map that never changes. `changed` gives another one, which shares nearly all of it."""

    def __init__(self, below: Mapping[str, V], above: Mapping[str, V | None] | None = None) -> None:
        self._below, self._above = below, above or {}

    def get(self, key: str) -> V | None:
        """What is there, or None."""
        return self._above[key] if key in self._above else self._below.get(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    def changed(self, values: Mapping[str, V | None]) -> Layered[V]:
        """With these values; None for what is there no more.

        The upper layer, which is copied with each change, grows to the square root of the lower one, and is
        then merged with it: so that is what a change costs.
        """
        if not values:
            return self
        above = {**self._above, **values}
        if len(above) <= ABOVE_MIN or len(above) ** 2 <= len(self._below):
            return Layered(self._below, above)
        below = dict(self._below)
        for key, value in above.items():
            if value is None:
                below.pop(key, None)
            else:
                below[key] = value
        return Layered(below)


@dataclass(frozen=True)
class Glance:
    """How a run stands after a batch: never changes, so that any thread may read it.

    `deadline`: when a tick is due, None for never. `clients_training`: those that have a live task.
    `phase`: of a strategy of phases, in words; empty of any other. `given_up`: it ended for want of anything
    that could be used, and by no budget.
    """

    strategy: str
    phase: str
    version: int
    finished: str
    given_up: bool
    paused: bool
    deadline: float | None
    counters: Counters
    clients_enrolled: int
    clients_training: int
    clients_quarantined: int
    live_tasks: int
    sums_waiting: int
    settings: EngineSettings
    changes: Changes
    clients: Layered[Capability]
    tasks: Layered[Task]
    receipts: Layered[Receipt]


class Glances:
    """Makes them, one after the other, for the thread that has the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine, ledger = engine, engine.ledger
        ledger.touched = Touched()
        self._clients = Layered({c: record.capability for c, record in ledger.clients.items()})
        self._tasks, self._receipts = Layered(dict(ledger.tasks)), Layered(dict(ledger.receipts))
        self._training = Counter(task.client_id for task in ledger.leased())

    def take(self) -> Glance:
        """How the run stands now."""
        engine, ledger = self._engine, self._engine.ledger
        touched, ledger.touched = ledger.touched or Touched(), Touched()
        self._clients = self._clients.changed({c: ledger.clients[c].capability for c in touched.clients})
        tasks = {t: ledger.tasks.get(t) for t in touched.tasks}
        for task_id, task in tasks.items():
            self._count(self._tasks.get(task_id), -1)
            self._count(task, +1)
        self._tasks = self._tasks.changed(tasks)
        self._receipts = self._receipts.changed({u: ledger.receipts.get(u) for u in touched.updates})
        return Glance(
            strategy=engine.strategy.name,
            phase=engine.strategy.phase(engine.state) if isinstance(engine.strategy, Phased) else "",
            version=engine.version,
            finished=engine.finished,
            given_up=engine.given_up,
            paused=engine.paused,
            deadline=engine.next_deadline(),
            counters=replace(engine.counters),
            clients_enrolled=len(ledger.clients),
            clients_training=len(self._training),
            clients_quarantined=len(engine.guard.quarantined),
            live_tasks=ledger.live,
            sums_waiting=0 if engine.cohorts is None else len(engine.cohorts.waiting),
            settings=engine.settings,
            changes=engine.changes,
            clients=self._clients,
            tasks=self._tasks,
            receipts=self._receipts,
        )

    def _count(self, task: Task | None, by: int) -> None:
        """Keep count of each client's live tasks."""
        if task is None or task.state is not TaskState.LEASED:
            return
        self._training[task.client_id] += by
        if not self._training[task.client_id]:
            del self._training[task.client_id]
