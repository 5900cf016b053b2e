"""A run with masked sums under test: its devices mask, and its keepers answer when they are told to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from machines import SPEC, Bench
from memory_log import MemoryLog

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.engine.cohorts import Cohorts, WaitingCohort
from anabranch.core.engine.engine import Engine
from anabranch.core.journal import to_record
from anabranch.core.model.updates import Capability, Update
from anabranch.core.secagg.ring import Numbers
from anabranch.core.secagg.sums import mask_sum
from anabranch.core.snapshot import Snapshot
from anabranch.host.build import Blueprint
from anabranch.host.secagg import mask_sum_arrived

SECAGG: dict[str, Any] = {"mode": "keeper", "keepers": ["north"], "clip": 2.0, "cohort_min": 2}
MASKING = Capability(codecs=("raw", "ring"))


def masked_config(
    strategy: dict[str, Any] | None = None, secagg: dict[str, Any] | None = None, **tables: Any
) -> Config:
    """FedBuff of two updates and one keeper, and what a test wants else."""
    base = {
        "strategy": {"name": "fedbuff", "buffer_size": 2} if strategy is None else strategy,
        "secagg": {**SECAGG, **(secagg or {})},
    }
    return merge([("masked", base), ("test", tables)])


def seed_of(update_id: str, keeper: str) -> bytes:
    """That of an update for a keeper."""
    return hashlib.sha256(f"{update_id} {keeper}".encode()).digest()


class MaskedBench(Bench):
    """A `Bench` of a run with masked sums. `integers`: what each update was before it was masked."""

    def __init__(self, config: Config | None = None) -> None:
        self.blueprint = Blueprint.of(config or masked_config(), SPEC, masks=True)
        super().__init__()
        self.engine = self.restored(None)
        self.integers: dict[str, list[int]] = {}

    def restored(self, snapshot: Snapshot | None) -> Engine:
        """An engine of the same run, from a snapshot or from its beginning."""
        return self.blueprint.engine({"w": np.zeros(4, np.float32)}, snapshot)

    @property
    def cohorts(self) -> Cohorts:
        """The engine's."""
        assert self.engine.cohorts is not None
        return self.engine.cohorts

    def enrol(self, *clients: str, now: float = 0.0) -> None:
        """Make clients known, which can mask."""
        for client in clients:
            self.do(ev.Enrolled(now, client, MASKING))

    def masked(self, update_id: str, integers: Iterable[int]) -> Numbers:
        """What a device sends."""
        terms = self.cohorts.terms
        seeds = [seed_of(update_id, keeper) for keeper in terms.keepers]
        return terms.ring.masked(np.asarray(list(integers), np.int64), seeds)

    def arrival(
        self, client: str, task: str, integers: Sequence[int], now: float = 1.0, **more: Any
    ) -> ev.UpdateArrived:
        """The event of an update."""
        open_task = self.engine.ledger.tasks.get(task)
        update_id = f"update-of-{task}"
        numbers = more.pop("numbers", None)
        update = Update(
            update_id,
            task,
            client,
            0 if open_task is None else open_task.base_version,
            1,
            self.masked(update_id, integers) if numbers is None else numbers,
        )
        data = update.delta.tobytes()  # type: ignore[union-attr]
        payload = ev.Payload(hashlib.sha256(data).hexdigest(), len(data), self.engine.settings.uplink)
        return ev.UpdateArrived(now, update, payload, **more)

    def send(
        self, client: str, task: str, integers: Sequence[int], now: float = 1.0, **more: Any
    ) -> list[Any]:
        """Send masked integers as the result of a task."""
        self.integers.setdefault(f"update-of-{task}", list(integers))
        return self.do(self.arrival(client, task, integers, now, **more))

    def give(self, client: str, task: str, integers: Sequence[int], now: float = 1.0) -> list[Any]:
        """Ask, and send."""
        self.ask(client, task, now)
        return self.send(client, task, integers, now)

    def answer_of(self, cohort: WaitingCohort, keeper: str = "north", now: float = 2.0) -> ev.MaskSumArrived:
        """What an honest keeper says of a cohort; in a private run its noise is of a key that tests know."""
        terms = self.cohorts.terms
        seeds = [(seed_of(m.update_id, keeper), m.weight) for m in cohort.members]
        numbers = mask_sum(terms, seeds, seed_of(str(cohort.number), keeper))
        return mask_sum_arrived(terms, now, cohort.number, keeper, numbers)[0]

    def answer(self, number: int, keeper: str = "north", now: float = 2.0) -> list[Any]:
        """A keeper answers."""
        cohort = next(c for c in self.cohorts.waiting if c.number == number)
        return self.do(self.answer_of(cohort, keeper, now))


def logged(b: MaskedBench) -> MemoryLog:
    """A log that has all that the bench does from now on."""
    log, do = MemoryLog(), b.do

    def doing(event: ev.Event) -> list[Any]:
        if not isinstance(event, ev.RolledBack):
            data = None
            if isinstance(event, ev.UpdateArrived):
                data = event.update.delta.tobytes()  # type: ignore[union-attr]
            elif isinstance(event, ev.MaskSumArrived):
                data = event.numbers.tobytes()
            log.append(to_record(event), data)
        return do(event)

    b.do = doing  # type: ignore[method-assign]
    return log
