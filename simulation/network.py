"""How long a message takes between a device and the server: latency + 8 x bytes / bandwidth.

Asks, answers, acknowledgements and heartbeats are so small that they take the latency alone. A model
or an update takes its bytes' time besides; what shares the server's line, `transfers.py` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from anabranch.core.config.ranges import ASKED
from anabranch.simulation.clock import Action, VirtualClock
from anabranch.workloads.profiles import DeviceProfiles
from anabranch.workloads.traces import DeviceMoment

UP, DOWN = "up", "down"  # from a device to the server, and back


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """The line between one device and the server: seconds, and bits a second (infinite: no limit).

    `asks`: for the model of a task; else that comes with the task, and has no way of its own.
    """

    latency_s: float
    up_bps: float = math.inf
    down_bps: float = math.inf
    asks: bool = True

    @classmethod
    def of(cls, profiles: DeviceProfiles, device: int) -> NetworkLink:
        """The link of a device of the fleet; devices with equal links share one."""
        return _link(
            float(profiles.latency_s[device]),
            float(profiles.up_bps[device]),
            float(profiles.down_bps[device]),
            profiles.fetch == ASKED,
        )

    def at(self, moment: DeviceMoment) -> NetworkLink:
        """What it is at a moment of a trace that says something of it."""
        return _link(
            self.latency_s if moment.latency_s is None else moment.latency_s,
            self.up_bps if moment.up_mbps is None else bps_of(moment.up_mbps),
            self.down_bps if moment.down_mbps is None else bps_of(moment.down_mbps),
            self.asks,
        )

    @property
    def model_s(self) -> float:
        """One way, for a model as for the request for it."""
        return self.latency_s if self.asks else 0.0

    def upload_s(self, payload_bytes: int) -> float:
        """Seconds from the first bit sent by the device to the last one at the server."""
        return self.latency_s + 8 * payload_bytes / self.up_bps

    def download_s(self, payload_bytes: int) -> float:
        """Seconds from the first bit sent by the server to the last one at the device."""
        return self.model_s + 8 * payload_bytes / self.down_bps


_link = lru_cache(maxsize=1024)(NetworkLink)


def bps_of(mbps: float) -> float:
    """Bits a second; 0 Mbit/s is no limit."""
    return mbps * 1e6 if mbps else math.inf


class Network(Protocol):
    """Carries messages between the devices and the server.

    `timeout_s`: a call that has no answer after so long, and the time that its bytes take, is repeated; None
    where messages always arrive.
    """

    timeout_s: float | None

    def send(self, client_id: str, way: str, due_s: float, action: Action) -> None:
        """A message of a device leaves now, `UP` or `DOWN`, is due then and brings `action` about."""
        ...


class PerfectNetwork:
    """Every message arrives once, when it is due."""

    timeout_s: float | None = None

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def send(self, client_id: str, way: str, due_s: float, action: Action) -> None:  # noqa: ARG002
        """See `Network`."""
        self._clock.at(due_s, action)
