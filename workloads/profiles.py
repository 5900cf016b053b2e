"""How fast each device of a fleet is, what its memory bears, what it spends: pure, a stream for each device.

| `fleet.speed` | step time of a device                                  | speed group                  |
|---------------|--------------------------------------------------------|------------------------------|
| `levels`      | `step_time_s` x one of `speed_levels` evenly spaced    | the level, 0 the fastest     |
|               | factors from 1 to `speed_ratio`                        |                              |
| `lognormal`   | `step_time_s` x exp(sigma z), sigma = ln(ratio) / 4    | `speed_levels` equal         |
|               |                                                        | quantiles, 0 the fastest     |
| `fadas-mild`  | `step_time_s` x U(1, 2), U(3, 5) or U(5, 8), drawn     | the delay class, 0 the       |
| `fadas-large` | for each task; large: U(50, 80) in place of U(5, 8)    | fastest                      |
| `measured`    | that of `step_times_s`, drawn for each task from       | `speed_levels` equal parts,  |
|               | 1 - `step_spreads` to 1 + `step_spreads` times it      | 0 the fastest                |
| `traced`      | that of `fleet.trace` (`traces.py`)                    | the same                     |

Levels: AsyncDrop, Dun et al. 2023, section 6. Delay classes: FADAS, Wang et al. 2024, by its
published code: the class is the argmax of a draw from Dirichlet(3, 2, 1).

What devices' memories bear, `fleet.widths_max`, and what they spend, goes by these groups too: with k numbers
for G groups group g gets the one at g k / G, rounded down. By `chance` each device draws a width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.config.ranges import ASKED, BY_CHANCE, BY_SPEED, ENERGY, MEASURED, TRACED
from anabranch.core.config.tables import FleetTable
from anabranch.core.errors import ConfigError
from anabranch.core.rng import rank, stream
from anabranch.workloads.traces import read_trace

Floats = npt.NDArray[np.float64]
Groups = npt.NDArray[np.int64]

FADAS_CONCENTRATION = (3.0, 2.0, 1.0)
FADAS_FACTORS = {
    "fadas-mild": ((1.0, 2.0), (3.0, 5.0), (5.0, 8.0)),
    "fadas-large": ((1.0, 2.0), (3.0, 5.0), (50.0, 80.0)),
}


@dataclass(frozen=True, eq=False)
class DeviceProfiles:
    """Speed, network and memory of every device: arrays of shape (count,).

    `step_time_s` is the mean time of one local step. `spread` (count, 2) holds the bounds of a task's
    uniform factor around it, (1, 1) where all tasks take the same. `up_bps` and `down_bps` are bits a
    second, infinite where the fleet sets no bandwidth. `width_max` is the share of the model's units that
    the device's memory bears, in (0, 1]. `train_w`, `up_j_per_mb` and `down_j_per_mb` are what it spends, 0
    where nobody has said it. `fetch` is the fleet's.
    """

    seed: int
    step_time_s: Floats
    group: Groups
    spread: Floats
    up_bps: Floats
    down_bps: Floats
    latency_s: Floats
    width_max: Floats
    train_w: Floats
    up_j_per_mb: Floats
    down_j_per_mb: Floats
    fetch: str = ASKED

    def task_time_s(self, device: int, task_index: int, steps: int) -> float:
        """Seconds that the device computes on its `task_index`-th task of `steps` local steps."""
        low, high = self.spread[device].tolist()
        draw = 0.0 if low == high else rank(self.seed, "task-time", device, task_index)
        return float(steps * self.step_time_s[device] * (low + (high - low) * draw))


def speed_profile(fleet: FleetTable, seed: int) -> DeviceProfiles:
    """The profiles of `fleet.clients` devices. What device i gets does not depend on how many there are.

    Raises `ConfigError` for an unknown `fleet.speed`, and for widths that cannot be dealt by it; `DataError`
    for a trace that cannot be read.
    """
    draw = {"levels": _levels, "lognormal": _lognormal, "fadas-mild": _fadas, "fadas-large": _fadas}
    if fleet.speed not in (*draw, MEASURED, TRACED):
        known = ", ".join([*draw, MEASURED, TRACED])
        raise ConfigError(f"fleet.speed must be one of {known}, not {fleet.speed!r}")
    if fleet.speed == MEASURED:
        drawn = _known(fleet, fleet.step_times_s, fleet.step_spreads)
    elif fleet.speed == TRACED:
        drawn = _known(fleet, read_trace(fleet.trace).step_times_s(), ())
    else:
        drawn = [draw[fleet.speed](fleet, seed, device) for device in range(fleet.clients)]
    groups, low, high = (np.array(column) for column in zip(*drawn, strict=True))
    mean = (low + high) / 2

    def each(measured: Sequence[float], same: float) -> Any:
        return np.resize(np.array(measured or [same], np.float64), fleet.clients)

    return DeviceProfiles(
        seed=seed,
        step_time_s=fleet.step_time_s * mean,
        group=groups.astype(np.int64),
        spread=np.stack([low / mean, high / mean], axis=1),
        up_bps=_bps(each(fleet.up_rates_mbps, fleet.up_mbps)),
        down_bps=_bps(each(fleet.down_rates_mbps, fleet.down_mbps)),
        latency_s=each(fleet.latencies_s, fleet.latency_s),
        width_max=_widths(fleet, seed, groups),
        fetch=fleet.fetch,
        **{name: _by_speed(fleet, name, getattr(fleet, name) or (0.0,), groups) for name in ENERGY},
    )


def _widths(fleet: FleetTable, seed: int, groups: Groups) -> Floats:
    """What each device's memory bears; `groups`: their speed groups, shape (count,). As `speed_profile`."""
    widths = fleet.widths_max or (1.0,)
    if fleet.widths_max_by == BY_SPEED:
        return _by_speed(fleet, "widths_max", widths, groups)
    draws = (rank(seed, "width-max", device) for device in range(fleet.clients))
    return np.array([widths[int(draw * len(widths))] for draw in draws], np.float64)


def _by_speed(fleet: FleetTable, key: str, values: Sequence[float], groups: Groups) -> Floats:
    """One of the values for each device: the first for the fastest. Raises `ConfigError`, naming the key."""
    kinds = len(FADAS_FACTORS.get(fleet.speed, ())) or fleet.speed_levels
    if kinds < len(values):
        by_chance = f", or set fleet.widths_max_by = {BY_CHANCE!r}" if key == "widths_max" else ""
        raise ConfigError(
            f"fleet.{key} has {len(values)} numbers, for as many speed groups at least, and there are "
            f"{kinds}: give fewer{by_chance}, or raise fleet.speed_levels"
        )
    return np.array(values, np.float64)[groups * len(values) // kinds]


def _bps(mbps: Floats) -> Floats:
    """Bits a second; 0 is no limit."""
    return np.where(mbps > 0, mbps * 1e6, math.inf)


@lru_cache(maxsize=16)
def level_order(levels: int, count: int) -> tuple[int, ...]:
    """So many of the levels, in the order in which devices take them: the ends, then the widest gap's middle.

    So any two devices span the whole ratio, and any fleet has its levels evenly spread.
    """
    order, gaps = [0, levels - 1][:levels], [(1 - levels, 0)]  # the widest first, of those the lowest
    while len(order) < count:
        width, low = heappop(gaps)
        high = low - width
        middle = (low + high) // 2
        order.append(middle)
        heappush(gaps, (low - middle, low))
        heappush(gaps, (middle - high, middle))
    return tuple(order[:count])


def _levels(fleet: FleetTable, seed: int, device: int) -> tuple[int, float, float]:
    """Group, and the bounds of the factor on `step_time_s`. Levels are dealt, not drawn."""
    del seed
    levels = fleet.speed_levels
    level = level_order(levels, min(levels, fleet.clients))[device % levels]
    factor = 1.0 + (fleet.speed_ratio - 1.0) * level / max(1, levels - 1)
    return level, factor, factor


def _known(
    fleet: FleetTable, times: Sequence[float], spreads: Sequence[float]
) -> list[tuple[int, float, float]]:
    """The same of every device that is known, in its order, and of those again."""
    spreads = spreads or [0.0] * len(times)
    rank_of = {device: place for place, device in enumerate(sorted(range(len(times)), key=times.__getitem__))}
    rows = []
    for device, (time_s, spread) in enumerate(zip(times, spreads, strict=True)):
        factor = time_s / fleet.step_time_s
        group = rank_of[device] * fleet.speed_levels // len(times)
        rows.append((group, factor * (1.0 - spread), factor * (1.0 + spread)))
    return [rows[device % len(rows)] for device in range(fleet.clients)]


def _lognormal(fleet: FleetTable, seed: int, device: int) -> tuple[int, float, float]:
    z = float(stream(seed, "speed", device).standard_normal())
    below = 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))
    factor = math.exp(z * math.log(fleet.speed_ratio) / 4.0)
    return min(int(below * fleet.speed_levels), fleet.speed_levels - 1), factor, factor


def _fadas(fleet: FleetTable, seed: int, device: int) -> tuple[int, float, float]:
    group = int(stream(seed, "speed", device).dirichlet(FADAS_CONCENTRATION).argmax())
    low, high = FADAS_FACTORS[fleet.speed][group]
    return group, low, high
