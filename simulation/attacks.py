"""Hostile devices of a simulation: what `fleet.attack` makes of their updates.

| attack       | s   | what a hostile device sends                                                          |
|--------------|-----|--------------------------------------------------------------------------------------|
| `sign_flip`  | 5   | -s Delta, of its own honest update Delta                                             |
| `scale`      | 100 | s Delta                                                                              |
| `alie`       | 1.5 | mean - s deviation of the honest updates of `COLLUDERS` of them, by coordinate       |
| `ipm`        | 5   | -s mean of the same                                                                  |
| `min_max`    | 1   | mean - s gamma deviation of the same, with the largest gamma that is not seen        |
| `label_flip` |     | what comes of training with every label y as the last label less y                   |
| `nan`        |     | no numbers                                                                           |
| `flood`      | 1   | -s Delta, in a `FLOOD`-th of the time                                                |

s is `fleet.attack_strength`, where that is not 0. `fleet.attackers` of the devices are hostile, a draw of the
seed. They are as fast as other devices and obey the protocol, so nothing but the values gives them away. The
colluders share their data: an attack of theirs starts from the model that its honest updates start from.

Sources, all recalled: sign flip, scaling and label flip are common; ALIE is Baruch, Baruch and Goldberg, "A
little is enough", NeurIPS 2019, where s follows from the numbers of devices; IPM is Xie, Koyejo and Gupta,
"Fall of empires", UAI 2019; min-max is Shejwalkar and Houmansadr, "Manipulating the Byzantine", NDSS 2021: it
is as far as may be, and no farther from any honest update than those are from each other, so a rule that goes
by distances cannot tell it; gamma in closed form is ours. The strengths are ours: such that the mean suffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from anabranch.core.config.tables import FleetTable
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Vector
from anabranch.core.parts import PartKind
from anabranch.core.rng import rank
from anabranch.workloads.app import Array, Examples
from anabranch.workloads.profiles import DeviceProfiles

COLLUDERS = 4
FLOOD = 10.0


class Poison:
    """What one attack makes of a hostile device: a base class, each method may be another attack's own.

    `strength`: its own s. `colluders`: of so many, itself included, it knows the honest updates. `haste`: how
    much faster than others its devices train.
    """

    name: ClassVar[str]
    strength: ClassVar[float] = 1.0
    colluders: ClassVar[int] = 1
    haste: ClassVar[float] = 1.0

    def labels(self, y: Array, last_label: Callable[[], int]) -> Array:  # noqa: ARG002 - the contract's
        """The labels that it trains on, of the shape of the honest ones, `y`; 0 to `last_label()`."""
        return y

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:  # noqa: ARG002 - the contract's
        """What it sends, of the honest updates of the colluders, its own first, each (size,)."""
        return deltas[0]


class SignFlip(Poison):
    """The other way, further."""

    name, strength = "sign_flip", 5.0

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """-s Delta."""
        return -s * deltas[0]


class Scale(Poison):
    """The same way, far too far."""

    name, strength = "scale", 100.0

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """S Delta."""
        return s * deltas[0]


class Alie(Poison):
    """A little is enough."""

    name, strength, colluders = "alie", 1.5, COLLUDERS

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """Mean - s deviation, by coordinate."""
        found: Vector = np.mean(deltas, axis=0) - s * np.std(deltas, axis=0)
        return found


class Ipm(Poison):
    """Against the inner product with the mean."""

    name, strength, colluders = "ipm", 5.0, COLLUDERS

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """-s mean."""
        found: Vector = -s * np.mean(deltas, axis=0)
        return found


class MinMax(Poison):
    """As far off as honest updates are from each other, whatever the rule."""

    name, colluders = "min_max", COLLUDERS

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """Mean - s gamma deviation: gamma is the largest with which it is no farther from any of them."""
        rows = np.asarray(deltas, np.float64)
        mean, deviation = rows.mean(axis=0), rows.std(axis=0)
        widest = max(float(np.square(a - b).sum()) for a in rows for b in rows)
        length = float(np.square(deviation).sum())
        if not length:
            return deltas[0]
        gammas = []
        for row in rows:  # length g^2 - 2 along g + apart = widest
            apart, along = float(np.square(mean - row).sum()), float((deviation * (mean - row)).sum())
            gammas.append((along + np.sqrt(along**2 + length * (widest - apart))) / length)
        found: Vector = mean - s * min(gammas) * deviation
        return found


class LabelFlip(Poison):
    """Honest training on wrong labels."""

    name = "label_flip"

    def labels(self, y: Array, last_label: Callable[[], int]) -> Array:
        """The last label less y."""
        return last_label() - y


class Nan(Poison):
    """No numbers."""

    name = "nan"

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:  # noqa: ARG002 - the contract's
        """Not one."""
        return np.full_like(deltas[0], np.nan)


class Flood(Poison):
    """Many, and each against the model."""

    name, haste = "flood", FLOOD

    def update(self, deltas: Sequence[Vector], s: float) -> Vector:
        """-s Delta."""
        return -s * deltas[0]


def _check(found: Any) -> None:
    if not (isinstance(found, type) and issubclass(found, Poison)):
        raise ConfigError("an attack is a class that inherits from anabranch.simulation.attacks.Poison")


BUILT_IN: dict[str, type[Poison]] = {
    c.name: c for c in (SignFlip, Scale, Alie, Ipm, MinMax, LabelFlip, Nan, Flood)
}
ATTACKS = PartKind("attack", "attacks", ("fleet.attack",), BUILT_IN, (), _check)


def hostile_devices(fleet: FleetTable, seed: int) -> tuple[int, ...]:
    """The devices that attack, increasing: as many as `fleet.attackers` says, to the nearest."""
    count = round(fleet.attackers * fleet.clients)
    if not count:
        return ()
    order = sorted(range(fleet.clients), key=lambda i: rank(seed, "attacker", i))
    return tuple(sorted(order[:count]))


def hurried(profiles: DeviceProfiles, fleet: FleetTable, seed: int) -> DeviceProfiles:
    """The profiles of the fleet, in which those whose attack is hasty are fast."""
    haste = ATTACKS.find(fleet.attack).haste
    if haste == 1.0:
        return profiles
    step_time_s = profiles.step_time_s.copy()
    step_time_s[list(hostile_devices(fleet, seed))] /= haste
    return replace(profiles, step_time_s=step_time_s)


class Attack:
    """What the devices of a fleet do that are hostile; nobody is where `fleet.attackers` is 0."""

    def __init__(self, fleet: FleetTable, seed: int) -> None:
        self._poison: Poison = ATTACKS.find(fleet.attack)()
        self.devices = hostile_devices(fleet, seed)
        self._strength = fleet.attack_strength or self._poison.strength

    def helpers(self, device: int) -> list[int]:
        """Whose honest updates the device's attack is made of, its own first; empty if it is honest."""
        if device not in self.devices:
            return []
        others = [d for d in self.devices if d != device]
        return [device, *others[: self._poison.colluders - 1]]

    def examples(self, device: int, honest: Examples, last_label: Callable[[], int]) -> Examples:
        """What the device trains on."""
        if device not in self.devices:
            return honest
        y = self._poison.labels(honest.y, last_label)
        return honest if y is honest.y else Examples(honest.x, y.astype(honest.y.dtype))

    def poisoned(self, deltas: Sequence[Vector]) -> Vector:
        """The hostile update, of the honest ones of the helpers; shape and dtype are theirs."""
        return np.asarray(self._poison.update(deltas, self._strength), deltas[0].dtype)
