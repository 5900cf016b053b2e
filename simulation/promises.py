"""What a server may not take back and what devices may not be wrong about, whatever goes wrong meanwhile.

For runs with faults: `Checker` looks at the engine's history, `Promises` at what was said to the devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from anabranch.core import events as ev
from anabranch.core.effects import Effect, Granted
from anabranch.core.engine.engine import Engine
from anabranch.simulation.checkers import Checker
from anabranch.simulation.devices import Device
from anabranch.simulation.run import Simulation
from anabranch.simulation.server import Process

# What the longest task, its lease and a few of the longest retries come to, where nothing goes wrong.
LIVE_WITHIN_S = 90.0


class Promises:
    """Watches a simulation with faults from before its first event; raises `AssertionError`.

    `every`: how many events lie between two looks at everything, which cost the most.
    """

    def __init__(self, simulation: Simulation, every: int = 1) -> None:
        assert isinstance(simulation.server, Process), "a run without faults has no promises to break"
        self.checker = Checker(simulation.engine, every)
        self._simulation, self._server, self._every = simulation, simulation.server, every
        self._granted_at: dict[str, float] = {}
        self._published_at = 0.0
        self._version = self._highest = 0
        simulation.world.observers.append(self.observe)
        simulation.world.taken_back.append(self._taken_back)
        simulation.world.restarted.append(self.checker.restarted)
        simulation.server.on_restart.append(self.look)

    def observe(self, event: ev.Event, effects: Sequence[Effect]) -> None:
        """One event."""
        self.checker.observe(event, effects)
        now = self._simulation.clock.now  # what the server takes for the time may have gone on meanwhile
        for effect in effects:
            if isinstance(effect, Granted):
                self._granted_at[effect.task.client_id] = now
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
        """The run is over, and nothing has gone wrong for `quiet_s`: everybody works, versions go on."""
        self.look()
        simulation = self._simulation
        if quiet_s < LIVE_WITHIN_S or simulation.engine.finished:
            return
        since_s = simulation.clock.now - quiet_s
        barred = simulation.engine.guard.quarantined
        free = [d.client_id for d in simulation.devices if d.client_id not in barred]
        idle = [client_id for client_id in free if self._granted_at.get(client_id, -1.0) < since_s]
        _need(not idle, f"{len(idle)} devices got no task after the faults were over: {idle[:5]}")
        _need(self._published_at >= since_s, f"no version after {self._published_at:.1f} s")

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
