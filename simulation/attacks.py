"""Hostile devices of a simulation: what `fleet.attack` makes of their updates.

| attack       | s   | what a hostile device sends                                                          |
|--------------|-----|--------------------------------------------------------------------------------------|
| `sign_flip`  | 5   | -s Delta, of its own honest update Delta                                             |
| `scale`      | 100 | s Delta                                                                              |
| `alie`       | 1.5 | mean - s deviation of the honest updates of `COLLUDERS` of them, by coordinate       |
| `ipm`        | 5   | -s mean of the same                                                                  |
| `label_flip` |     | what comes of training with every label y as the last label less y                   |
| `nan`        |     | no numbers                                                                           |
| `flood`      | 1   | -s Delta, in a `FLOOD`-th of the time                                                |

s is `fleet.attack_strength`, where that is not 0. `fleet.attackers` of the devices are hostile, a draw of the
seed. They are as fast as other devices and obey the protocol, so nothing but the values gives them away. The
colluders share their data: an attack of theirs starts from the model that its honest updates start from.

Sources, all recalled: sign flip, scaling and label flip are common; ALIE is Baruch, Baruch and Goldberg, "A
little is enough", NeurIPS 2019, where s follows from the numbers of devices; IPM is Xie, Koyejo and Gupta,
"Fall of empires", UAI 2019. The strengths are ours: such that the mean suffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from anabranch.core.config.tables import FleetTable
from anabranch.core.model.params import Vector
from anabranch.core.rng import rank
from anabranch.workloads.app import Examples
from anabranch.workloads.profiles import DeviceProfiles

COLLUDERS = 4
FLOOD = 10.0
STRENGTHS = {"sign_flip": 5.0, "scale": 100.0, "alie": 1.5, "ipm": 5.0, "flood": 1.0}


def hostile_devices(fleet: FleetTable, seed: int) -> tuple[int, ...]:
    """The devices that attack, increasing: as many as `fleet.attackers` says, to the nearest."""
    count = round(fleet.attackers * fleet.clients)
    if not count:
        return ()
    order = sorted(range(fleet.clients), key=lambda i: rank(seed, "attacker", i))
    return tuple(sorted(order[:count]))


def hurried(profiles: DeviceProfiles, fleet: FleetTable, seed: int) -> DeviceProfiles:
    """The profiles of the fleet, in which those that flood are fast."""
    if fleet.attack != "flood":
        return profiles
    step_time_s = profiles.step_time_s.copy()
    step_time_s[list(hostile_devices(fleet, seed))] /= FLOOD
    return replace(profiles, step_time_s=step_time_s)


class Attack:
    """What the devices of a fleet do that are hostile; nobody is where `fleet.attackers` is 0."""

    def __init__(self, fleet: FleetTable, seed: int) -> None:
        self.name = fleet.attack
        self.devices = hostile_devices(fleet, seed)
        self._strength = fleet.attack_strength or STRENGTHS.get(self.name, 1.0)

    def helpers(self, device: int) -> list[int]:
        """Whose honest updates the device's attack is made of, its own first; empty if it is honest."""
        if device not in self.devices:
            return []
        if self.name not in ("alie", "ipm"):
            return [device]
        others = [d for d in self.devices if d != device]
        return [device, *others[: COLLUDERS - 1]]

    def examples(self, device: int, honest: Examples, last_label: Callable[[], int]) -> Examples:
        """What the device trains on: with a label flip each y is `last_label()` less y."""
        if self.name != "label_flip" or device not in self.devices:
            return honest
        return Examples(honest.x, (last_label() - honest.y).astype(honest.y.dtype))

    def poisoned(self, deltas: Sequence[Vector]) -> Vector:
        """The hostile update, of the honest ones of the helpers; shape and dtype are theirs."""
        own, s = deltas[0], self._strength
        match self.name:
            case "sign_flip" | "flood":
                found = -s * own
            case "scale":
                found = s * own
            case "alie":
                found = np.mean(deltas, axis=0) - s * np.std(deltas, axis=0)
            case "ipm":
                found = -s * np.mean(deltas, axis=0)
            case "nan":
                found = np.full_like(own, np.nan)
            case _:
                found = own
        return np.asarray(found, own.dtype)
