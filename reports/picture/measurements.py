"""What versions were measured at: a table for each metric, so that a long run is drawn fast."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from anabranch.core.model.arrays import Array
from anabranch.reports.picture.columns import Columns


class Measurements:
    """Of each metric the versions, ascending, and the values, NaN where one is not finite."""

    def __init__(self) -> None:
        self._tables: dict[str, Columns] = {}

    @property
    def names(self) -> list[str]:
        """The metrics, in the order in which they were first told."""
        return [name for name, table in self._tables.items() if len(table)]

    def add(self, version: int, metrics: Mapping[str, float | None]) -> None:
        """A version was measured; of two measurements the later one counts."""
        for name, value in metrics.items():
            if name not in self._tables:
                self._tables[name] = Columns(version=np.int64, value=np.float64)
            table = self._tables[name]
            row = int(np.searchsorted(table["version"], version))
            known = row < len(table) and table["version"][row] == version
            told = math.nan if value is None else value
            if known:
                table.cells["value"][row] = told
            else:
                table.insert(row, version, told)

    def of(self, name: str) -> tuple[Array, Array]:
        """The versions of a metric, and the values."""
        table = self._tables[name]
        return table["version"], table["value"]

    def best(self, name: str, greater: bool) -> float | None:
        """The best finite value of a metric; None where there is none."""
        values = self._tables[name]["value"] if name in self._tables else np.zeros(0)
        finite = values[np.isfinite(values)]
        return None if not len(finite) else float(finite.max() if greater else finite.min())

    def cut(self, version: int) -> None:
        """Forget what is of later versions."""
        for table in self._tables.values():
            table.cut(int(np.searchsorted(table["version"], version, side="right")))

    @property
    def size_bytes(self) -> int:
        """What it takes of memory."""
        return sum(table.size_bytes for table in self._tables.values())
