"""Energy of simulated devices: power while they train, energy of every byte that has come through.

| symbol     | name           | meaning                                                              |
|------------|----------------|----------------------------------------------------------------------|
| P          | `train_w`      | watts of a device while it trains, beyond what it draws in any case  |
| t          |                | seconds that it has trained, also where nothing came of it           |
| e_u, e_d   | `*_j_per_byte` | joules of a byte sent and of one received                            |
| B_u, B_d   |                | bytes of updates that came to the server, of models that came here   |

    E = P t + e_u B_u + e_d B_d

What a device draws in any case is left out, as it draws that without any learning too; so are small messages
and transfers that broke off. Devices that nobody has measured have zeros, and cost nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from anabranch.core.config.goal import MIN
from anabranch.reports.fairness import worst_tenth
from anabranch.reports.result import Energy


@dataclass(frozen=True, slots=True)
class DeviceEnergy:
    """P, e_u and e_d of a device."""

    train_w: float = 0.0
    up_j_per_byte: float = 0.0
    down_j_per_byte: float = 0.0


@dataclass(slots=True)
class _Spent:
    """Joules of one device so far."""

    train_j: float = 0.0
    up_j: float = 0.0
    down_j: float = 0.0

    @property
    def total_j(self) -> float:
        return self.train_j + self.up_j + self.down_j


class EnergyMeter:
    """Adds up what devices spend; `costs` of each by its name. Moments are in seconds, and never go back."""

    def __init__(self, costs: Callable[[str], DeviceEnergy]) -> None:
        self._costs = costs
        self._spent: dict[str, _Spent] = {}
        self._training: dict[object, tuple[str, float]] = {}  # a process: of which device, and since when
        self._closed_j = 0.0  # all that is over
        self._training_w = self._before_j = 0.0  # of those under way, and what these would have spent by then

    def begin(self, now: float, process: object, device: str) -> None:
        """A process of a device begins to train; one that trains already goes on."""
        if process in self._training:
            return
        self._training[process] = device, now
        self._training_w += (watts := self._costs(device).train_w)
        self._before_j += watts * now

    def end(self, now: float, process: object) -> None:
        """It does not train any more, if it did."""
        if process not in self._training:
            return
        device, since = self._training.pop(process)
        watts = self._costs(device).train_w
        self._of(device).train_j += (joules := watts * (now - since))
        self._closed_j += joules
        if self._training:
            self._training_w -= watts
            self._before_j -= watts * since
        else:  # and what rounding has left of them
            self._training_w = self._before_j = 0.0

    def sent(self, device: str, count: int) -> None:
        """So many bytes of a device have come to the server."""
        self._of(device).up_j += (joules := self._costs(device).up_j_per_byte * count)
        self._closed_j += joules

    def received(self, device: str, count: int) -> None:
        """So many have come to a device."""
        self._of(device).down_j += (joules := self._costs(device).down_j_per_byte * count)
        self._closed_j += joules

    def total_j(self, now: float) -> float:
        """Of all devices until now, trainings under way among it: no more work for a large fleet."""
        return self._closed_j + self._training_w * now - self._before_j

    def devices_j(self, now: float) -> dict[str, float]:
        """Of each device that has spent something."""
        return {device: spent.total_j for device, spent in self._until(now).items()}

    def summary(self, now: float, to_target_j: float | None) -> Energy:
        """What the result says; `to_target_j`: of all until the target was reached."""
        spent = list(self._until(now).values())
        train_j, up_j, down_j = (
            sum(getattr(s, kind) for s in spent) for kind in ("train_j", "up_j", "down_j")
        )
        each = [s.total_j for s in spent]
        return Energy(
            total_j=train_j + up_j + down_j,
            train_j=train_j,
            up_j=up_j,
            down_j=down_j,
            devices=len(each),
            device_median_j=statistics.median(each) if each else 0.0,
            device_worst_tenth_j=worst_tenth(each, MIN) if each else 0.0,
            to_target_j=to_target_j,
        )

    def _until(self, now: float) -> dict[str, _Spent]:
        found = {device: _Spent(s.train_j, s.up_j, s.down_j) for device, s in self._spent.items()}
        for device, since in self._training.values():
            found.setdefault(device, _Spent()).train_j += self._costs(device).train_w * max(0.0, now - since)
        return dict(sorted(found.items()))

    def _of(self, device: str) -> _Spent:
        return self._spent.setdefault(device, _Spent())
