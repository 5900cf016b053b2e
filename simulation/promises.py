"""What a server may not take back and what devices may not be wrong about, whatever goes wrong meanwhile.

For runs with faults: `Checker` looks at the engine's history, `Promises` at what was said to the devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.core import events as ev
from anabranch.core.effects import Decided, Effect, Granted, LeaseEnd, LeaseEnded, Refused
from anabranch.core.engine.engine import Engine
from anabranch.core.model.updates import FLAWS
from anabranch.simulation.checkers import Checker
from anabranch.simulation.devices import Device
from anabranch.simulation.run import Simulation
from anabranch.simulation.server import Process

# What the longest task, its lease and a few of the longest retries come to, where nothing goes wrong.
LIVE_WITHIN_S = 90.0
SHARED = 8  # of so many places one is for the devices whose tasks came to nothing again
LATE_S = 0.5  # for the way of an ask


@dataclass
class LapsedDevice:
    """Of a device whose last tasks came to nothing: how many in a row, and when it may have another.

    `since`: it asks for one of the few places, and is refused; it is expected back by `due`. So many as
    `passed` have had a task meanwhile and came later.
    """

    lapses: int
    until: float
    since: float | None = None
    due: float = 0.0
    passed: int = 0


class Turns:
    """What devices whose tasks came to nothing are promised while others wait, by what was said to them.

    Who lapses once has a task in time, as if it had not. Who lapses again waits for a lease, or for three,
    and for its turn among its like: who came later has a task later, but where a place is kept for it.
    """

    def __init__(self) -> None:
        self._of: dict[str, LapsedDevice] = {}
        self._granted_at = -math.inf  # to who has lapsed again

    def forget(self) -> None:
        """The server is another, and knows nothing of it."""
        self._of.clear()

    def refused(self, client_id: str, now: float, latest_s: float) -> None:
        """A device has no task now, and comes again within `latest_s`."""
        turn = self._of.get(client_id)
        if turn is not None and now >= turn.until:
            turn.since, turn.due = turn.since or now, now + latest_s + LATE_S

    def observe(self, effects: Sequence[Effect], now: float) -> None:
        """What an event has come to."""
        for effect in effects:
            match effect:
                case Granted(task, False):
                    self._granted(task.client_id, now)
                case LeaseEnded(task, LeaseEnd.EXPIRED | LeaseEnd.SUPERSEDED | LeaseEnd.DROPPED):
                    before = self._of.get(task.client_id)
                    lapses = 1 if before is None else before.lapses + 1
                    leases = (0, 1, 3)[min(lapses, 3) - 1]
                    self._of[task.client_id] = LapsedDevice(lapses, now + leases * task.lease_s)
                case Decided(client_id, receipt, _, False) if receipt.decision.reason not in FLAWS:
                    self._of.pop(client_id, None)

    def is_due(self, client_id: str, now: float, live: int) -> bool:
        """Whether a device that has had no task for `LIVE_WITHIN_S` should have had one by now.

        `live`: how many devices are in training.
        """
        turn = self._of.get(client_id)
        if turn is None or turn.lapses < 2:
            return True
        if now < turn.until + LIVE_WITHIN_S:
            return turn.passed >= max(1, live // SHARED)
        return turn.since is None or self._granted_at < now - LIVE_WITHIN_S

    def _granted(self, client_id: str, now: float) -> None:
        mine = self._of.get(client_id)
        if mine is None or mine.lapses < 2:
            return
        self._granted_at = now
        since = now if mine.since is None else mine.since
        for other in self._of.values():
            if other.since is not None and other.since < since and now <= other.due:
                other.passed += 1
        mine.since = None


class Promises:
    """Watches a simulation with faults from before its first event; raises `AssertionError`.

    `every`: how many events lie between two looks at everything, which cost the most.
    """

    def __init__(self, simulation: Simulation, every: int = 1) -> None:
        assert isinstance(simulation.server, Process), "a run without faults has no promises to break"
        self.checker = Checker(simulation.engine, every)
        self._simulation, self._server, self._every = simulation, simulation.server, every
        self._granted_at: dict[str, float] = {}
        self._turns = Turns()
        self._published_at = 0.0
        self._version = self._highest = 0
        simulation.world.observers.append(self.observe)
        simulation.world.taken_back.append(self._taken_back)
        simulation.world.restarted.append(self.checker.restarted)
        simulation.world.restarted.append(lambda _: self._turns.forget())
        simulation.world.refused.append(self._refused)
        simulation.server.on_restart.append(self.look)

    def observe(self, event: ev.Event, effects: Sequence[Effect]) -> None:
        """One event."""
        self.checker.observe(event, effects)
        now = self._simulation.clock.now  # what the server takes for the time may have gone on meanwhile
        for effect in effects:
            if isinstance(effect, Granted):
                self._granted_at[effect.task.client_id] = now
        self._turns.observe(effects, now)
        if self._simulation.engine.version > self._version:
            self._version, self._published_at = self._simulation.engine.version, now
            self._highest = max(self._highest, self._version)
        if self.checker.events % self._every == 0:
            for device in self._simulation.devices:
                self._check_view(device)

    def look(self) -> None:
        """Everything that was ever told still holds."""
        receipts = self._simulation.engine.ledger.receipts
        for update_id, decision in self._server.told.decisions.items():
            receipt = receipts.get(update_id)
            _need(receipt is not None, f"update {update_id} was acknowledged and is lost")
            assert receipt is not None
            _need(receipt.decision == decision, f"update {update_id} is decided otherwise than it was told")
        for device in self._simulation.devices:
            self._check_view(device)

    def _taken_back(self, engine: Engine, seq: int) -> None:
        """The log ends at an earlier event: what comes now is held against what was before that."""
        self.checker.taken_back(seq)
        self._version = engine.version

    @property
    def counts(self) -> Counter[str]:
        """What has become of the server's disk, and how often."""
        return self._server.counts

    @property
    def restarts(self) -> int:
        """How often the server came back."""
        return self._server.restarts

    def check_end(self, quiet_s: float) -> None:
        """The run is over, and nothing has gone wrong for `quiet_s`: everybody works, versions go on.

        But for who has lapsed again (`Turns`), and waits.
        """
        self.look()
        simulation = self._simulation
        if quiet_s < LIVE_WITHIN_S or simulation.engine.finished:
            return
        since_s = simulation.clock.now - quiet_s
        barred = simulation.engine.guard.quarantined
        free = [d.client_id for d in simulation.devices if d.client_id not in barred]
        idle = [client_id for client_id in free if self._granted_at.get(client_id, -1.0) < since_s]
        live = simulation.engine.ledger.live
        idle = [c for c in idle if self._turns.is_due(c, simulation.clock.now, live)]
        _need(not idle, f"{len(idle)} devices got no task after the faults were over: {idle[:5]}")
        _need(self._published_at >= since_s, f"no version after {self._published_at:.1f} s")

    def _refused(self, refused: Refused) -> None:
        self._turns.refused(refused.ask.client_id, self._simulation.clock.now, refused.retry_after_s[1])

    def _check_view(self, device: Device) -> None:
        """What a device believes is what the server has told, and has not forgotten."""
        view, name, told = device.view, device.client_id, self._server.told
        _need(
            view.holds is None or view.holds <= self._highest,
            f"{name} holds version {view.holds}, which nobody has published",
        )
        for task in view.tasks:
            known = (task.task_id, name, task.base_version) in told.tasks
            _need(known, f"{name} has the task {task.task_id}, which nobody has granted it")


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)
