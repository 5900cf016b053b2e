"""A simulated run in which nobody is let in, nothing that comes is taken, or nothing comes, says so.

At its end it says whose updates could not be used.

A part of one's own may bring it there, or devices that go before they are done. It goes on for ever where
only updates or versions end it, and hours of virtual time take a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from anabranch.core import events as ev
from anabranch.core.effects import Decided, Effect, LeaseEnd, LeaseEnded, Refused
from anabranch.host.standstill import WANTS_ONE, Pause
from anabranch.reports.text import counted, duration_text
from anabranch.simulation.problem import device_index
from anabranch.simulation.world import World

log = logging.getLogger(__name__)

STANDSTILL_S = 3600.0  # of virtual time
DEVICES_TOLD = 3
LOSSES_MIN = 4  # of each task that was open at a time: a slow run has some between its updates
GAPS_MIN = 4  # as long as no update has come before, as by night


class Standstill:
    """Hears of refused asks, of updates and of lost work; it changes nothing in the run."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.refused.append(self.refused)
        world.rejected.append(self.rejected)
        self._granted, self._since = 0, 0.0
        self._pause = Pause(STANDSTILL_S)
        self._applied, self._rejected, self._rejected_s = 0, 0, 0.0
        self._rejecting = Pause(STANDSTILL_S)
        world.observers.append(self._observed)
        world.vanished.append(self._vanished)
        self._left, self._ended, self._open = 0, 0, 0
        self._came_s, self._gap_s = 0.0, 0.0  # when the last update came; the longest time without one
        self._losing = Pause(STANDSTILL_S)
        world.invalid.append(self._invalid)
        self._invalids: dict[str, tuple[int, str]] = {}  # of a device: how many, and why the last one was

    def refused(self, refused: Refused) -> None:
        """A device has no task."""
        engine, now = self._world.engine, self._world.clock.now
        granted = engine.counters.granted
        if engine.ledger.live or granted != self._granted or refused.reason not in WANTS_ONE:
            self._granted, self._since = granted, now
            self._pause.over()
        elif self._pause.due(now - self._since):
            told = f"{refused.ask.client_id} is told {refused.reason}: {refused.detail}"
            lasted = duration_text(now - self._since)
            log.warning("no device has had a task for %s of virtual time: %s", lasted, told)

    def rejected(self, decided: Decided) -> None:
        """An update was not taken."""
        now, applied = self._world.clock.now, self._world.engine.counters.applied
        if applied != self._applied or not self._rejected:
            self._applied, self._rejected, self._rejected_s = applied, 0, now
            self._rejecting.over()
        self._rejected += 1
        if self._rejecting.due(now - self._rejected_s):
            lasted, count = duration_text(now - self._rejected_s), counted(self._rejected, "update")
            decision = decided.receipt.decision
            told = f"{decided.client_id} is told {decision.reason}: {decision.detail}"
            log.warning(
                "no update was taken for %s of virtual time, and %s rejected: %s", lasted, count, told
            )

    def _observed(self, event: ev.Event, effects: Sequence[Effect]) -> None:
        """An update has come, or leases may have ended without one."""
        if isinstance(event, ev.UpdateArrived):
            self._came()
            return
        self._open = max(self._open, len(self._world.engine.ledger.tasks))
        for effect in effects:
            if isinstance(effect, LeaseEnded) and effect.end is not LeaseEnd.CANCELLED:
                self._lost(left=0, ended=1)

    def _came(self) -> None:
        now = self._world.clock.now
        self._gap_s, self._came_s = max(self._gap_s, now - self._came_s), now
        self._left = self._ended = self._open = 0
        self._losing.over()

    def _vanished(self, client_id: str) -> None:
        """A device is gone, perhaps from a task, or from the transfer of what it has made of one."""
        if self._world.engine.ledger.has_open(client_id):
            self._lost(left=1, ended=0)

    def _lost(self, left: int, ended: int) -> None:
        self._left, self._ended = self._left + left, self._ended + ended
        losses = max(self._left, self._ended)  # the lease of a task whose device is gone ends as well
        without_s = self._world.clock.now - self._came_s
        if losses <= LOSSES_MIN * self._open or without_s < GAPS_MIN * self._gap_s:
            return
        if self._losing.due(without_s):
            log.warning(
                "no update has come for %s of virtual time, in which devices vanished %s with a task and %s "
                "ended: tasks with their transfers take longer than devices stay, or than their leases; "
                "raise fleet.availability_period_s, fleet.up_mbps or server.lease_s, lower fleet.dropout, or "
                "give less to do (client.steps)",
                duration_text(without_s),
                counted(self._left, "time"),
                counted(self._ended, "lease"),
            )

    def _invalid(self, client_id: str, why: str) -> None:
        self._came()
        self._invalids[client_id] = (self._invalids.get(client_id, (0, ""))[0] + 1, why)

    def told(self, flaws: Callable[[int], Sequence[str]]) -> None:
        """Say at the run's end whose updates could not be used. `flaws`: of a device's data."""
        if not self._invalids:
            return
        names = sorted(self._invalids)
        count = counted(sum(n for n, _ in self._invalids.values()), "update")
        shown = [f"{name}: {self._invalids[name][1]}" for name in names[:DEVICES_TOLD]]
        for i, name in enumerate(names[:DEVICES_TOLD]):
            if found := flaws(device_index(name)):
                shown[i] += f"; its {', its '.join(found)}: mend its data"
        others = len(names) - DEVICES_TOLD
        more = f"; and {counted(others, 'device')} more" if others > 0 else ""
        log.warning("%s rejected as invalid. %s%s", count, "; ".join(shown), more)

    def ended(self, asleep: int) -> None:
        """Nothing is to come: so many devices wait to be called, and nobody is there who would."""
        if asleep:
            log.warning(
                "the run is over as nothing more can happen: no device has a task, and %s never called",
                f"{counted(asleep, 'device')} that asked {'was' if asleep == 1 else 'were'}",
            )
