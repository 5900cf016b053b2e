"""How a simulated device speaks: by its own clock, on its own link, as long as it is there."""

from __future__ import annotations

from anabranch.simulation.clock import Action
from anabranch.simulation.faults import DeviceClock
from anabranch.simulation.network import UP, NetworkLink
from anabranch.simulation.presence import DevicePresence
from anabranch.simulation.surroundings import Surroundings


class Talker(DevicePresence):
    """Base of a device, under its sessions and tasks. `client_id` is its name."""

    __slots__ = ("_around", "_life", "_network", "_time", "client_id", "link")

    def __init__(self, client_id: str, around: Surroundings, link: NetworkLink, time: DeviceClock) -> None:
        super().__init__(around.clock, around.fleet, around.horizon_s)
        self.client_id = client_id
        self._around, self._network, self.link, self._time = around, around.network, link, time
        self._life = 0  # counts how often it has vanished: what it had sent by then is gone

    @property
    def _now(self) -> float:
        """By its own clock."""
        return self._time.local(self._clock.now)

    def _moment(self, local_s: float) -> float:
        """When its clock shows this; at once if it does already."""
        return max(self._clock.now, self._time.true(local_s))

    @property
    def _soon(self) -> float:
        """When a small message that leaves now is due."""
        return self._clock.now + self.link.latency_s

    def _say(self, due_s: float, action: Action) -> None:
        """A message to the server, unless the device vanishes before it is there."""
        self._network.send(self.client_id, UP, due_s, _Message(self, action))


class _Message:
    """What a device has said. In a large fleet each has one under way: a closure takes four times as much."""

    __slots__ = ("_action", "_life", "_of")

    def __init__(self, of: Talker, action: Action) -> None:
        self._of, self._life, self._action = of, of._life, action

    def __call__(self) -> None:
        if self._life == self._of._life:
            self._action()
