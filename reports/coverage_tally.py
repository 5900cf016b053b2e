"""Counts which units were trained when and by whom, in bounded memory, however long a run is."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.model.submodels import UnitMap
from anabranch.core.model.units import UnitGroup
from anabranch.reports.result import Coverage

ROWS_MAX, SLOTS, DEVICES_MAX = 32, 48, 40
FIRST_SLOT_S = 0.125  # doubled whenever a run outgrows its slots

Counts = npt.NDArray[np.int64]


class CoverageTally:
    """Of one group. Neighbouring units share a row where there are more than `ROWS_MAX`."""

    def __init__(self, group: UnitGroup) -> None:
        self._group = group
        rows = min(group.size, ROWS_MAX)
        self._row_of = np.arange(group.size) * rows // group.size
        self._slot_s = FIRST_SLOT_S
        self._updates = np.zeros(SLOTS, np.int64)
        self._trained = np.zeros((rows, SLOTS), np.int64)
        self._devices: dict[str, Counts] = {}
        self._updates_of: dict[str, int] = {}

    def add(self, now: float, client: str, kept: tuple[int, ...] | None) -> None:
        """An applied update of a device that kept these units (None: all of them)."""
        while now >= SLOTS * self._slot_s:
            self._double()
        units = slice(None) if kept is None else list(kept)
        rows = np.bincount(self._row_of[units], minlength=len(self._trained))
        slot = int(now / self._slot_s)
        self._updates[slot] += 1
        self._trained[:, slot] += rows
        self._devices[client] = self._devices.get(client, np.zeros_like(rows)) + rows
        self._updates_of[client] = self._updates_of.get(client, 0) + 1

    def coverage(self) -> Coverage:
        """What was counted; of the devices the busiest."""
        used = int(np.flatnonzero(self._updates).max(initial=0)) + 1
        busiest = sorted(self._updates_of.items(), key=lambda item: (-item[1], item[0]))[:DEVICES_MAX]
        return Coverage(
            group=self._group.name,
            units=self._group.size,
            row_units=_plain(np.bincount(self._row_of)),
            slot_s=self._slot_s,
            updates=_plain(self._updates[:used]),
            trained=tuple(_plain(row[:used]) for row in self._trained),
            device_updates=dict(busiest),
            device_trained={name: _plain(self._devices[name]) for name, _ in busiest},
        )

    def _double(self) -> None:
        self._slot_s *= 2
        self._updates = _halved(self._updates)
        self._trained = _halved(self._trained)


def _halved(counts: Any) -> Any:
    """Two slots in the place of one; the second half is free again."""
    pairs = counts.reshape(*counts.shape[:-1], SLOTS // 2, 2).sum(axis=-1)
    return np.concatenate([pairs, np.zeros_like(pairs)], axis=-1)


def _plain(counts: Counts) -> tuple[int, ...]:
    return tuple(int(n) for n in counts)


class Coverages:
    """The tallies of a run's groups."""

    def __init__(self) -> None:
        self._tallies: list[CoverageTally] = []

    def add(self, now: float, client: str, groups: tuple[UnitGroup, ...], submodel: UnitMap | None) -> None:
        """An applied update of a model with these groups; without a sub-model of the whole."""
        self._tallies = self._tallies or [CoverageTally(group) for group in groups]
        for g, tally in enumerate(self._tallies):
            tally.add(now, client, None if submodel is None else submodel.kept[g])

    def coverages(self) -> tuple[Coverage, ...]:
        """Of every group, in the model's order."""
        return tuple(tally.coverage() for tally in self._tallies)
