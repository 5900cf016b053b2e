"""A simulated run in which nobody is let in, or nothing that comes is taken, says so.

A part of one's own may bring it there. It goes on for ever where only updates or versions end it, and hours
of virtual time take a second.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from anabranch.core.effects import Decided, Effect, Refused
from anabranch.core.events import Event
from anabranch.core.model.updates import Verdict
from anabranch.host.standstill import WANTS_ONE, Pause
from anabranch.reports.text import counted, duration_text
from anabranch.simulation.world import World

log = logging.getLogger(__name__)

STANDSTILL_S = 3600.0  # of virtual time


class Standstill:
    """Hears of refused asks and of what becomes of updates; it changes nothing in the run."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.refused.append(self.refused)
        world.observers.append(self.handled)
        self._granted, self._since = 0, 0.0
        self._pause = Pause(STANDSTILL_S)
        self._rejected, self._rejected_s, self._rejecting = 0, 0.0, Pause(STANDSTILL_S)

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

    def handled(self, _: Event, effects: Sequence[Effect]) -> None:
        """An event has come to these."""
        for effect in effects:
            if isinstance(effect, Decided) and not effect.duplicate:
                self._decided(effect)

    def _decided(self, decided: Decided) -> None:
        now, decision = self._world.clock.now, decided.receipt.decision
        if decision.verdict is not Verdict.REJECTED:
            self._rejected = 0
            self._rejecting.over()
            return
        self._rejected_s = self._rejected_s if self._rejected else now  # the first of those in a row
        self._rejected += 1
        if self._rejecting.due(now - self._rejected_s):
            lasted, count = duration_text(now - self._rejected_s), counted(self._rejected, "update")
            told = f"{decided.client_id} is told {decision.reason}: {decision.detail}"
            log.warning(
                "no update was taken for %s of virtual time, and %s rejected: %s", lasted, count, told
            )

    def ended(self, asleep: int) -> None:
        """Nothing is to come: so many devices wait to be called, and nobody is there who would."""
        if asleep:
            log.warning(
                "the run is over as nothing more can happen: no device has a task, and %s never called",
                f"{counted(asleep, 'device')} that asked {'was' if asleep == 1 else 'were'}",
            )
