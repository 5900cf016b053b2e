"""What the devices of a simulation spend, by the fleet's settings and its trace."""

from __future__ import annotations

from functools import lru_cache

from anabranch.core.config.ranges import ENERGY
from anabranch.reports.energy import DeviceEnergy, EnergyMeter
from anabranch.simulation.problem import device_index
from anabranch.workloads.profiles import DeviceProfiles
from anabranch.workloads.traces import Trace

MB = 1e6  # bytes


def meter_of(profiles: DeviceProfiles, trace: Trace | None) -> EnergyMeter | None:
    """The meter of a fleet; None where nobody says what anything takes."""
    of_fleet = [getattr(profiles, name) for name in ENERGY]
    traced = [] if trace is None else [getattr(device, name) for device in trace.devices for name in ENERGY]
    if not any(values.any() for values in of_fleet) and not any(traced):
        return None

    @lru_cache(maxsize=100_000)
    def costs(client_id: str) -> DeviceEnergy:
        device, found = device_index(client_id), []
        for name, values in zip(ENERGY, of_fleet, strict=True):
            own = None if trace is None else getattr(trace.of(device), name)
            found.append(float(values[device]) if own is None else own)
        train_w, up_j_per_mb, down_j_per_mb = found
        return DeviceEnergy(train_w, up_j_per_mb / MB, down_j_per_mb / MB)

    return EnergyMeter(costs)
