"""What the devices of a simulation share, what they say of themselves, and what they show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from anabranch.compress.registry import STAGES
from anabranch.core.config.tables import FleetTable
from anabranch.core.model.updates import Capability, Task
from anabranch.reports.energy import EnergyMeter
from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.elastic import ElasticTrainings
from anabranch.simulation.executors.base import Executor
from anabranch.simulation.hasher import Hasher
from anabranch.simulation.network import Network
from anabranch.simulation.server import DirectServer
from anabranch.simulation.server_time import ServerTime
from anabranch.simulation.storage import EMPTY, Storage
from anabranch.simulation.transfers import Lines
from anabranch.workloads.arrival import Arrivals
from anabranch.workloads.profiles import DeviceProfiles
from anabranch.workloads.traces import Trace


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What all devices share."""

    clock: VirtualClock
    server: DirectServer
    network: Network
    lines: Lines
    executor: Executor
    hasher: Hasher
    fleet: FleetTable
    profiles: DeviceProfiles
    seed: int
    step_cost: Callable[[Task], float]  # relative to the whole model's
    horizon_s: float  # devices leave for good before this
    time: ServerTime
    push_steps: int = 1  # the least between two exchanges of a device that trains on
    elastic: ElasticTrainings | None = None  # where devices train on
    frozen_bytes: int = 0  # what travels apart from the versions, to each device once
    storage: Storage = EMPTY  # what a device has on its disk at first
    codecs: tuple[str, ...] = STAGES  # what devices say that they have
    arrivals: Arrivals | None = None  # of their examples, where these come one after the other
    trace: Trace | None = None  # when they are there, and how their links are
    energy: EnergyMeter | None = None  # counts what they spend, where that is known

    def capability(self, device: int, examples: int) -> Capability:
        """What a device with so many examples says of itself."""
        fleet = self.fleet
        links = fleet.up_mbps * 1e6, fleet.down_mbps * 1e6
        return _capability(examples, *links, self.codecs, self.width_max(device))

    def width_max(self, device: int) -> float:
        """The share of the model's units that a device's memory bears."""
        traced = None if self.trace is None else self.trace.of(device).width_max
        return float(self.profiles.width_max[device]) if traced is None else traced

    @property
    def widest(self) -> float:
        """The largest share of all."""
        if self.trace is None:
            return float(self.profiles.width_max.max())
        return max(map(self.width_max, range(self.fleet.clients)))


@dataclass(frozen=True)
class View:
    """What a device believes: the version that it holds, the tasks that it has in hand or in its outbox."""

    holds: int | None
    tasks: tuple[Task, ...]


@lru_cache(maxsize=1024)
def _capability(
    examples: int, up_bps: float, down_bps: float, codecs: tuple[str, ...], width_max: float
) -> Capability:
    """Devices that say the same share it."""
    return Capability(examples, up_bps=up_bps, down_bps=down_bps, codecs=codecs, width_max=width_max)
