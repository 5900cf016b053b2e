"""A simulated run in which nobody trains and nobody is let in, by a scheduler of one's own perhaps, says so.

It goes on for ever where only updates or versions end it, and hours of virtual time take a second.
"""

from __future__ import annotations

import logging

from anabranch.core.effects import Refused
from anabranch.host.standstill import WANTS_ONE, Pause
from anabranch.reports.text import counted, duration_text
from anabranch.simulation.world import World

log = logging.getLogger(__name__)

STANDSTILL_S = 3600.0  # of virtual time


class Standstill:
    """Hears of refused asks; it changes nothing in the run."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.refused.append(self.refused)
        self._granted, self._since = 0, 0.0
        self._pause = Pause(STANDSTILL_S)

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

    def ended(self, asleep: int) -> None:
        """Nothing is to come: so many devices wait to be called, and nobody is there who would."""
        if asleep:
            log.warning(
                "the run is over as nothing more can happen: no device has a task, and %s never called",
                f"{counted(asleep, 'device')} that asked {'was' if asleep == 1 else 'were'}",
            )
