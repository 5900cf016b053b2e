"""Runs in which the server's machine fails as well as the network, and what is noted of them from outside.

Every note here is the test's own, by the virtual clock: nothing is taken from what the code believes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rough import rough

from anabranch.core import events as ev
from anabranch.core.config import Config
from anabranch.core.effects import Effect, Granted, LeaseEnd, LeaseEnded
from anabranch.core.rng import rank
from anabranch.core.updates import TaskState
from anabranch.simulation.run import Simulation
from anabranch.simulation.server import Process

NEAR_S = 1e-3  # what floats and answers that are written at the same moment come to
OVERDUE_S = 2.0  # a lease may end so late: its tick waits for a disk that is full
STEPS_S = (60.0, 3600.0, 3e6)

DISASTERS = {
    "clock_step_every_s": 8.0,
}


def disastrous(seed: int, clients: int = 16, **faults: Any) -> Config:
    """A rough run (`rough.py`) with every fault of the server's machine as well."""
    step_s = STEPS_S[int(rank(seed, "disaster", "step") * len(STEPS_S))]
    return rough(seed, clients, **{**DISASTERS, "clock_step_s": step_s, **faults})


class Elapsed:
    """Leases last as long as they were granted for, by the true time, whatever the server's clock says."""

    def __init__(self, simulation: Simulation) -> None:
        assert isinstance(simulation.server, Process)
        self._simulation, self._server = simulation, simulation.server
        self._due_s: dict[str, float] = {}
        self._expires: dict[str, float] = {}
        self._last: tuple[int, float, float] | None = None
        self.ended = 0
        simulation.world.observers.append(self.observe)

    def observe(self, event: ev.Event, effects: Sequence[Effect]) -> None:
        """One event."""
        now, engine = self._simulation.clock.now, self._simulation.engine
        self._check_pace(event.now, now)
        leased = {t.task_id: t for t in engine.ledger.tasks.values() if t.state is TaskState.LEASED}
        for task_id, task in leased.items():
            anew = isinstance(event, ev.Returned) or self._expires.get(task_id) != task.expires_at
            if anew:
                self._due_s[task_id], self._expires[task_id] = now + task.lease_s, task.expires_at
            late_s = now - self._due_s[task_id]
            assert late_s <= OVERDUE_S, f"the lease of {task_id} should have ended {late_s:.1f} s ago"
        for effect in effects:
            match effect:
                case LeaseEnded(task, LeaseEnd.EXPIRED):
                    self.ended += 1
                    left_s = self._due_s[task.task_id] - now
                    assert left_s <= NEAR_S, f"a lease ended {left_s:.1f} s before its time"
                case Granted(task, again=True):
                    assert task.task_id in self._due_s

    def _check_pace(self, event_s: float, now: float) -> None:
        life = self._server.restarts
        if self._last is not None and self._last[0] == life:
            _, event_before_s, before_s = self._last
            apart_s = (event_s - event_before_s) - (now - before_s)
            assert abs(apart_s) <= NEAR_S, f"the time of events went {apart_s:.1f} s apart from the true one"
        self._last = life, event_s, now
