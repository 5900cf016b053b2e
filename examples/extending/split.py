"""A split of one's own: device i has i + 1 times as many examples as device 0, of all labels."""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.core.config.tables import FleetTable
from anabranch.core.rng import stream
from anabranch.workloads.splits import Labels, Rows


def steps(labels: Labels, count: int, fleet: FleetTable, seed: int, speed_groups: Any) -> list[Rows]:
    order = stream(seed, "split", "steps").permutation(len(labels))
    shares = np.cumsum(np.arange(1, count)) / (count * (count + 1) / 2)
    return np.split(order, np.rint(shares * len(labels)).astype(np.int64))
