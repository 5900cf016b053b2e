"""How well the places of a capped run are used, and by whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleets import Ones, config

from anabranch.core import events as ev
from anabranch.core.config.ranges import PLACES
from anabranch.core.effects import Effect, Granted, Refused
from anabranch.core.engine.waiting import WaitingLine
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.simulation.run import Simulation, open_simulation


@dataclass(frozen=True)
class Places:
    """`idle`: the share of the places that nobody had, over time. `grants`: by device. `refused`: asks."""

    idle: float
    grants: list[int]
    refused: int


class _Watch:
    """Adds up the free places between events, from `start_s` on."""

    def __init__(self, simulation: Simulation, places: int, start_s: float) -> None:
        self._ledger, self._places, self._start_s = simulation.engine.ledger, places, start_s
        self._last_s = self._live = self.free_s = 0.0
        self.grants: Counter[str] = Counter()
        self.refused = 0

    def observe(self, event: ev.Event, effects: Sequence[Effect]) -> None:
        """One event."""
        passed_s = event.now - max(self._last_s, self._start_s)
        self.free_s += max(0.0, passed_s) * (self._places - self._live)
        self._last_s, self._live = event.now, self._ledger.live
        self.grants.update(e.task.client_id for e in effects if isinstance(e, Granted))

    def refuse(self, refused: Refused) -> None:
        """One ask in vain."""
        self.refused += 1


def use_of_places(
    clients: int,
    places: int,
    line: bool = True,
    virtual_s: float = 300.0,
    windows: str = PLACES,
    **fleet: Any,
) -> Places:
    """Run a fleet whose tasks take some seconds; `line=False`: whoever comes first is served."""
    settings = config(
        run={"virtual_s_max": virtual_s},
        fleet={"clients": clients, "step_time_s": 1.0, **fleet},
        server={"concurrency": places, "windows": windows},
    )
    with open_simulation(settings, app=Ones()) as simulation:
        if not line:
            simulation.world.host.line = WaitingLine(replace(DEFAULT_LIMITS, waiting_max=0))
        watch = _Watch(simulation, places, start_s=30.0)
        simulation.world.observers.append(watch.observe)
        simulation.world.refused.append(watch.refuse)
        simulation.run()
        names = [device.client_id for device in simulation.devices]
        idle = watch.free_s / (places * (virtual_s - 30.0))
        return Places(idle, [watch.grants[name] for name in names], watch.refused)
