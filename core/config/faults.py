"""What can go wrong with a message, and when: one vocabulary for the simulator and for the live client.

Every draw is from a stream that is named by the seed, the link and the number of the message, so the same
seed has the same faults, and one more message on one link changes nothing on another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import NormalDist

from anabranch.core.later import LATER_KEY
from anabranch.core.rng import rank

LOGNORMAL_SIGMA = 1.0
PARETO_SHAPE = 2.0  # the lightest tail without a variance
RANK_STEP = 2.0**-53  # of `rank`, which is never 1


@dataclass(frozen=True)
class FaultsTable:
    """`[faults]`: what goes wrong in a simulation. Zero is never; every `every_s` is a mean time between two.

    `loss`, `duplication`, `delay` and `reordering` are probabilities of a message; `delay_shape`: `fixed`,
    `uniform`, `exponential`, `lognormal`, `pareto`. `until_s`: from then on nothing goes wrong (0: always).
    `torn_tail`, `lost_tail`: of a crash of the server, that it cuts off the write in hand, that the disk has
    lost what was acknowledged.
    """

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    delay: float = 0.0
    delay_s: float = 1.0
    delay_shape: str = "exponential"
    timeout_s: float = 10.0
    partition_every_s: float = 0.0
    partition_s: float = 10.0
    partition_fraction: float = 0.5
    swizzle_every_s: float = 0.0
    swizzle_s: float = 10.0
    swizzle_fraction: float = 0.5
    device_crash_every_s: float = 0.0
    device_down_s: float = 10.0
    server_crash_every_s: float = 0.0
    server_down_s: float = 5.0
    commit_s: float = 0.005
    skew_s: float = 0.0
    drift: float = 0.0
    until_s: float = 0.0
    clock_step_every_s: float = field(default=0.0, metadata=LATER_KEY)
    clock_step_s: float = field(default=3600.0, metadata=LATER_KEY)
    disk_full_every_s: float = field(default=0.0, metadata=LATER_KEY)
    disk_full_s: float = field(default=10.0, metadata=LATER_KEY)
    torn_tail: float = field(default=0.0, metadata=LATER_KEY)
    lost_tail: float = field(default=0.0, metadata=LATER_KEY)
    restore_every_s: float = field(default=0.0, metadata=LATER_KEY)
    restore_age_s: float = field(default=10.0, metadata=LATER_KEY)
    device_copy_every_s: float = field(default=0.0, metadata=LATER_KEY)
    device_copy_s: float = field(default=20.0, metadata=LATER_KEY)
    keeper_crash_every_s: float = field(default=0.0, metadata=LATER_KEY)
    keeper_down_s: float = field(default=10.0, metadata=LATER_KEY)

    @property
    def on(self) -> bool:
        """Whether anything can go wrong at all."""
        return any(getattr(self, name) for name in FAULTS)

    @property
    def takes_back(self) -> bool:
        """Whether the server may lose what it had acknowledged: versions, then, whose numbers come again."""
        return bool(self.restore_every_s or self.lost_tail)


FAULTS = (
    "loss",
    "duplication",
    "reordering",
    "delay",
    "partition_every_s",
    "swizzle_every_s",
    "device_crash_every_s",
    "server_crash_every_s",
    "skew_s",
    "drift",
    "clock_step_every_s",
    "disk_full_every_s",
    "restore_every_s",
    "device_copy_every_s",
    "keeper_crash_every_s",
)


class FaultKind(StrEnum):
    """What happens to a call, or to a message of it."""

    LOST = "lost"  # it never arrives
    ANSWER_LOST = "answer_lost"  # it is carried out, the caller does not hear of it
    DUPLICATED = "duplicated"  # it is carried out twice, the caller hears the second answer
    DELAYED = "delayed"  # it comes later
    REORDERED = "reordered"  # it is held back until a later message of the link has gone by


@dataclass(frozen=True)
class Fate:
    """What becomes of one message: the extra delay in seconds of every copy that arrives; none: it is lost.

    `held`: a later message overtakes it.
    """

    delays_s: tuple[float, ...] = (0.0,)
    held: bool = False

    @property
    def kinds(self) -> tuple[FaultKind, ...]:
        """The faults in it."""
        found = {
            FaultKind.LOST: not self.delays_s,
            FaultKind.DUPLICATED: len(self.delays_s) > 1,
            FaultKind.DELAYED: any(self.delays_s),
            FaultKind.REORDERED: self.held,
        }
        return tuple(kind for kind, there in found.items() if there)


UNHARMED = Fate()


class MessageFaults:
    """Draws the fates of the messages of every link, as `[faults]` says."""

    def __init__(self, table: FaultsTable, seed: int) -> None:
        self._table, self._seed = table, seed

    def fate(self, link: str, number: int) -> Fate:
        """What becomes of the `number`-th message of a link (a device and a direction, by name)."""
        table = self._table
        if self._draw("loss", link, number) < table.loss:
            return Fate(())
        copies = 1 + (self._draw("duplication", link, number) < table.duplication)
        delays_s = tuple(self._delay_s(link, number, copy) for copy in range(copies))
        return Fate(delays_s, self._draw("reordering", link, number) < table.reordering)

    def _delay_s(self, link: str, number: int, copy: int) -> float:
        if self._draw("delay", link, number, copy) >= self._table.delay:
            return 0.0
        u = self._draw("delay-length", link, number, copy)
        return length_s(self._table.delay_shape, self._table.delay_s, u)

    def _draw(self, purpose: str, link: str, *numbers: int) -> float:
        return rank(self._seed, "fault", purpose, link, *numbers)


def length_s(shape: str, mean_s: float, u: float) -> float:
    """The value of a distribution of this mean at the quantile u in [0, 1).

    `fixed`, `uniform` (from 0 to twice the mean), `exponential`, `lognormal` (sigma = 1), `pareto` (shape 2).
    """
    if shape == "fixed":
        return mean_s
    if shape == "uniform":
        return 2.0 * mean_s * u
    if shape == "exponential":
        return -mean_s * math.log1p(-u)
    if shape == "lognormal":
        z = NormalDist().inv_cdf(min(u + RANK_STEP / 2.0, 1.0 - RANK_STEP))  # which is defined within 0 and 1
        return mean_s * math.exp(LOGNORMAL_SIGMA * z - LOGNORMAL_SIGMA**2 / 2.0)
    least_s = mean_s * (PARETO_SHAPE - 1.0) / PARETO_SHAPE
    return least_s * math.pow(1.0 - u, -1.0 / PARETO_SHAPE)
