"""A simulated run in which nobody is let in, or nothing that comes is taken, says so.

At its end it says whose updates could not be used.

A part of one's own may bring it there. It goes on for ever where only updates or versions end it, and hours
of virtual time take a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from anabranch.core.effects import Decided, Refused
from anabranch.host.standstill import WANTS_ONE, Pause
from anabranch.reports.text import counted, duration_text
from anabranch.simulation.problem import device_index
from anabranch.simulation.world import World

log = logging.getLogger(__name__)

STANDSTILL_S = 3600.0  # of virtual time
DEVICES_TOLD = 3


class Standstill:
    """Hears of refused asks and rejected updates; it changes nothing in the run."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.refused.append(self.refused)
        world.rejected.append(self.rejected)
        self._granted, self._since = 0, 0.0
        self._pause = Pause(STANDSTILL_S)
        self._applied, self._rejected, self._rejected_s = 0, 0, 0.0
        self._rejecting = Pause(STANDSTILL_S)
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

    def _invalid(self, client_id: str, why: str) -> None:
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
