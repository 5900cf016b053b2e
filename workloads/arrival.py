"""Data that arrive while a run goes on: which of a simulated device's examples are there at a moment.

| symbol | meaning                                                                                 |
|--------|-----------------------------------------------------------------------------------------|
| n      | examples of a device in the end                                                         |
| t_j    | when its j-th one is there: t_j - t_(j-1) is exponential, of mean 1 / `fleet.arrival_rate` |
| w      | `fleet.arrival_window`: the newest that it keeps; 0: all                                |
| u_j    | j / n, how far the arrival has come                                                     |

At t a device has those of j with t_j <= t, of them the last w. In which order they come `fleet.arrival_drift`
says: as they lie (`none`); class after class in an order of the device's own, places blurred by a tenth of n
(`classes`); as they lie, and changed more and more (`rotate`: pictures are turned by floor(4 u) quarters; an
App may change its examples otherwise, by `App.drift`).

Source: the scenario is that of streaming pre-training (Hu et al., arXiv 2104.12081), whose data are not
labelled; the laws of arrival and drift are this platform's.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from anabranch.core.config.ranges import CLASSES, ROTATE, STREAM
from anabranch.core.config.tables import FleetTable
from anabranch.core.errors import DataError
from anabranch.core.rng import stream
from anabranch.workloads.app import App, Array, Examples

Times = npt.NDArray[np.float64]
BLUR = 0.1
DEVICES_KEPT = 10_000


class Arrivals:
    """When the examples of the devices of a fleet arrive, in seconds of the run."""

    def __init__(self, fleet: FleetTable, seed: int) -> None:
        self._fleet, self._seed = fleet, seed
        self._times: OrderedDict[int, Times] = OrderedDict()

    @classmethod
    def of(cls, fleet: FleetTable, seed: int) -> Arrivals | None:
        """Those of a fleet; None where all is there from the start."""
        return cls(fleet, seed) if fleet.arrival == STREAM else None

    def first_s(self, device: int, count: int) -> float:
        """When a device of `count` examples has its first."""
        return float(self._of(device, count)[0])

    def rows(self, device: int, count: int, now_s: float) -> slice:
        """Which of its examples, in the order of their arrival, it has at a moment; at least the first."""
        last = max(1, int(np.searchsorted(self._of(device, count), now_s, "right")))
        window = self._fleet.arrival_window or count
        return slice(max(0, last - window), last)

    def present(self, device: int, count: int, now_s: float) -> int:
        """How many these are."""
        rows = self.rows(device, count, now_s)
        return int(rows.stop - rows.start)

    def in_order(self, app: App, device: int, examples: Examples) -> Examples:
        """A device's examples in the order of their arrival, as they are then. Raises `DataError`."""
        if type(examples) is not Examples:
            raise DataError(
                f"fleet.arrival = {STREAM!r} needs examples in arrays: let data() return Examples(x, y)"
            )
        if self._fleet.arrival_drift == CLASSES:
            rows = self._by_class(device, examples.y)
            return Examples(examples.x[rows], examples.y[rows])
        if self._fleet.arrival_drift == ROTATE:
            share = np.arange(len(examples)) / len(examples)
            return app.drift(examples, share) or Examples(turned(examples.x, share), examples.y)
        return examples

    def _of(self, device: int, count: int) -> Times:
        found = self._times.get(device)
        if found is None or len(found) != count:
            gaps = stream(self._seed, "arrival", device).exponential(1 / self._fleet.arrival_rate, count)
            found = self._times[device] = np.cumsum(gaps)
            if len(self._times) > DEVICES_KEPT:
                self._times.popitem(last=False)
        return found

    def _by_class(self, device: int, labels: Array) -> npt.NDArray[np.int64]:
        if labels.ndim != 1 or labels.dtype.kind not in "iub":
            raise DataError(
                f"fleet.arrival_drift = {CLASSES!r} needs a class number for each example, not "
                f"{labels.dtype} of shape {labels.shape}: write none"
            )
        draws = stream(self._seed, "drift", device)
        classes, place = np.unique(labels, return_inverse=True)
        turn = draws.permutation(len(classes))[place]
        count = len(labels)
        ranks = np.empty(count)
        ranks[np.argsort(turn, kind="stable")] = np.arange(count)
        return np.argsort(ranks + draws.uniform(0, BLUR * count, count), kind="stable")


def turned(x: Array, share: Times) -> Array:
    """Pictures (n, ..., s, s) or (n, s * s), each turned by floor(4 share) quarters. Raises `DataError`."""
    shape = x.shape
    side = math.isqrt(shape[1]) if x.ndim == 2 else shape[-1]
    if x.ndim == 1 or (side * side != shape[1] if x.ndim == 2 else shape[-2] != side):
        raise DataError(
            f"fleet.arrival_drift = {ROTATE!r} turns square pictures, not examples of shape {shape[1:]}: "
            "say in the App's drift(examples, share) how they change"
        )
    pictures = x.reshape(len(x), -1, side, side).copy()
    for quarters in (1, 2, 3):
        those = np.floor(4 * share) == quarters
        pictures[those] = np.rot90(pictures[those], quarters, (2, 3))
    return pictures.reshape(shape)
