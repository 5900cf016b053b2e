"""Copies of devices: a second machine with what is on the first one's disk, under the same name.

Both work at a time until one of them goes for good, by chance the copy or the one that it was made of. The
server tells them apart by their sessions (`core/engine/sessions.py`): one has the tasks, the other waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.devices import Device

Toss = Callable[[str, int], float]


class Copies:
    """`devices`: all that are there, copies too. `toss`: a uniform number of a device and a copy of it."""

    def __init__(self, devices: list[Device], clock: VirtualClock, toss: Toss) -> None:
        self._devices, self._clock, self._toss = devices, clock, toss
        self._of = {device.client_id: device for device in devices}

    def make(self, client_id: str, number: int, lasts_s: float) -> None:
        """Copy a device that has not left; after so many seconds there is one of the two again."""
        first = self._of[client_id]
        if first.has_left:
            return
        second = first.copied(number)
        self._devices.append(second)
        goes = second if self._toss(client_id, number) < 0.5 else first
        self._of[client_id] = first if goes is second else second
        second.begin()
        self._clock.at(self._clock.now + lasts_s, partial(self._end, goes))

    def crash(self, client_id: str, down_s: float) -> None:
        """The one that stays crashes."""
        self._of[client_id].crash(down_s)

    def _end(self, device: Device) -> None:
        device.leave()
        self._devices.remove(device)
