"""Devices of a large fleet before their first task: each is a row, and not yet a device.

All of a fleet make themselves known and ask once; where few may train at a time most of them sleep from then
on (`waiting_room.py`). Until it gets a task, or has to ask again by itself, a newcomer is an index, a name
and what it does next. It says what a device says, at the same moments and in the same order, so that the run
is the same to the bit; then the device is made, as after its first ask.

    enrols --(one way)--> is known --(back)--> asks --(one way)--> sleeps --(called)--> a device
                                                               +-> a device, if it need not sleep
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from anabranch.core.config.ranges import ELASTIC, OVERLAP, STREAM
from anabranch.core.config.tables import Config
from anabranch.core.device.session import first_task_id
from anabranch.core.effects import Refused
from anabranch.core.errors import ConfigError, StoreFull
from anabranch.core.model.updates import Ask
from anabranch.simulation.devices import FIRST_LIFE, Device
from anabranch.simulation.server import Granting
from anabranch.simulation.surroundings import Surroundings

Make = Callable[[int, str], Device]


def come_as_rows(config: Config) -> bool:
    """Whether all devices are there from the first moment on, and nothing but a task happens to them."""
    fleet = config.fleet
    come_and_go = fleet.availability < 1.0 or fleet.leavers or fleet.trace or fleet.arrival == STREAM
    return not (come_and_go or config.faults.on) and config.client.push not in (ELASTIC, OVERLAP)


class Newcomers:
    """Those of a fleet that have not had a task. `examples`: how many each device has; `make` makes it."""

    def __init__(self, around: Surroundings, examples: array[int], make: Make) -> None:
        self.around, self.examples, self.make = around, examples, make

    def begin(self, names: Callable[[int], str]) -> None:
        """All make themselves known."""
        for index in range(len(self.examples)):
            _Newcomer(self, index, names(index)).go_on(_Newcomer.enrol)


class _Newcomer:
    """One of them: an action of the clock, and a sleeper of the waiting room. A million take 60 MB."""

    __slots__ = ("_index", "_of", "_step", "client_id")

    def __init__(self, of: Newcomers, index: int, client_id: str) -> None:
        self._of, self._index, self.client_id = of, index, client_id
        self._step: Callable[[_Newcomer], None] = _Newcomer.enrol

    def __call__(self) -> None:
        self._step(self)

    def go_on(self, step: Callable[[_Newcomer], None]) -> None:
        """Do this when a message that leaves now has arrived."""
        around = self._of.around
        self._step = step
        around.clock.at(around.clock.now + float(around.profiles.latency_s[self._index]), self)

    def enrol(self) -> None:
        """The server hears who it is."""
        of, around = self._of, self._of.around
        capability = around.capability(self._index, of.examples[self._index])
        around.server.enrol(self.client_id, capability, self._is_known)

    def _is_known(self, failed: ConfigError | StoreFull | None) -> None:
        assert not isinstance(failed, StoreFull), "no disk is full without [faults]"
        if failed is None:  # else the run has nothing for it
            self.go_on(_Newcomer._hears)

    def _hears(self) -> None:
        self.go_on(_Newcomer._ask)

    def _ask(self) -> None:
        around = self._of.around
        if around.server.turns_away(self):
            return
        task_id = first_task_id(around.seed, self.client_id)
        ask = Ask(self.client_id, task_id, around.storage.held.version, FIRST_LIFE, "")
        around.server.ask(ask, self._told)

    def _told(self, granting: Granting | StoreFull) -> None:
        if isinstance(granting, Refused) and self._of.around.server.waits(granting, self):
            return
        self._of.make(self._index, self.client_id).asked(granting)

    def called(self) -> None:
        """The server has called for it, who was asleep."""
        self._of.make(self._index, self.client_id).woken()
