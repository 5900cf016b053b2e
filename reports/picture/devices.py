"""The devices of a run: a row of figures each, by number, for a hundred thousand of them."""

from __future__ import annotations

import math
import zlib

import numpy as np

from anabranch.core.model.arrays import Array
from anabranch.reports.picture.columns import Columns

SPEEDS = 9  # tasks of late, of which a device's speed is the median
SPEED_COLUMNS = tuple(f"speed{i}" for i in range(SPEEDS))
NEVER = -1


class DeviceRows:
    """What has been counted of each device. Rows are in the order in which the devices were heard of."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.quarantined: dict[int, tuple[str, float | None]] = {}  # why, and since when, if known
        self.flaws: dict[int, tuple[int, int]] = {}  # flaws, and updates that the clip has cut
        self.flaws_told = False  # a server does, records do not
        self.run_twice: set[int] = set()
        self.lease_until: dict[int, float] = {}
        self._rows: dict[str, int] = {}
        self._folded: list[str] = []
        self._by_name: Array = np.zeros(0, np.int64)
        self.columns = Columns(
            lot=np.uint32,
            updates=np.int64,
            rejected=np.int64,
            examples=np.int64,
            staleness_sum=np.int64,
            judged=np.int64,
            up=np.int64,
            down=np.int64,
            seen=np.float64,
            base=np.int64,
            open=np.int32,
            away=np.bool_,
            timed=np.int64,
            speed=np.float32,
            weighed=np.int64,
            heard=np.float64,
            width=np.float32,
            **dict.fromkeys(SPEED_COLUMNS, np.float32),
        )

    def __len__(self) -> int:
        return len(self.names)

    def row(self, name: str) -> int:
        """The number of a device, a new one where it has never been heard of."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self.names)
            self.names.append(name)
            lot = zlib.crc32(name.encode())
            zeros = (0,) * 7
            self.columns.add(
                lot, *zeros, np.nan, NEVER, 0, False, 0, np.nan, 0, 0.0, np.nan, *(0.0,) * SPEEDS
            )
        return row

    def find(self, name: str) -> int | None:
        """The number of a device that was heard of."""
        return self._rows.get(name)

    def timed(self, row: int, seconds: float) -> None:
        """A task took a device so long, from grant to update; its speed is the median of the newest."""
        cells = self.columns.cells
        count = cells["timed"]
        cells[SPEED_COLUMNS[count[row] % SPEEDS]][row] = seconds
        count[row] += 1
        known = sorted(cells[name][row] for name in SPEED_COLUMNS[: count[row]])
        cells["speed"][row] = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2

    def was_heard(self, row: int, share: float) -> None:
        """So much of an update of it is in a version, 0 to 1, by the robust rule."""
        cells = self.columns.cells
        cells["weighed"][row] += 1
        cells["heard"][row] += share

    def heard(self, rows: Array) -> Array:
        """How much of their updates the rule has heard, on average; NaN where it has said nothing of any."""
        weighed, heard = self.columns["weighed"][rows], self.columns["heard"][rows]
        shares: Array = np.divide(heard, weighed, out=np.full(len(rows), np.nan), where=weighed > 0)
        return shares

    def by_name(self) -> Array:
        """Every row, in the order of the names."""
        known = len(self._by_name)
        if known != len(self.names):
            # Two runs that are in order already: Python's sort merges them, and compares little else.
            fresh = sorted(range(known, len(self.names)), key=self.names.__getitem__)
            rows = sorted([*self._by_name.tolist(), *fresh], key=self.names.__getitem__)
            self._by_name = np.array(rows, np.int64)
        return self._by_name

    def named(self, rows: Array, text: str) -> Array:
        """Those of the rows whose names have this text in them, in capitals or not."""
        for name in self.names[len(self._folded) :]:
            self._folded.append(name.casefold())
        wanted, has = text.casefold(), np.zeros(len(self.names), np.bool_)
        has[[row for row, name in enumerate(self._folded) if wanted in name]] = True
        return rows[has[rows]]

    def sample(self, count: int) -> Array:
        """So many rows, in the order of the names: drawn by lot, and the same from call to call."""
        rows = self.by_name()
        if len(rows) <= count:
            return rows
        drawn = np.sort(np.argsort(self.columns["lot"], kind="stable")[:count])
        return rows[np.isin(rows, drawn, assume_unique=True)]

    def states(self, now: float, silence_s: float | None) -> Array:
        """Of each device: an index into `STATES`."""
        columns = self.columns
        states = np.where(columns["open"] > 0, TRAINING, IDLE).astype(np.int8)
        gone = columns["away"].copy()
        if silence_s is not None:
            gone |= ~(columns["seen"] >= now - silence_s)
        states[gone & (states == IDLE) | columns["away"]] = OFFLINE
        states[list(self.quarantined)] = QUARANTINED
        return states

    @property
    def size_bytes(self) -> int:
        """What it takes of memory, without the names."""
        return self.columns.size_bytes + self._by_name.nbytes

    def seen(self, row: int, t: float) -> None:
        """It has called, then or later."""
        seen = self.columns.cells["seen"]
        seen[row] = t if math.isnan(seen[row]) else max(seen[row], t)

    def given(self, row: int, version: int) -> None:
        """It was given this version, or a later one."""
        base = self.columns.cells["base"]
        base[row] = max(base[row], version)

    def stands(self, row: int, updates: int, rejected: int, flaws: tuple[int, int]) -> None:
        """What the server says of a device: more than was seen here, or less where some was counted twice."""
        cells = self.columns.cells
        cells["updates"][row], cells["rejected"][row] = updates, rejected
        self.flaws_told = True
        if any(flaws):
            self.flaws[row] = flaws
        else:
            self.flaws.pop(row, None)


STATES = ("idle", "training", "offline", "quarantined")
IDLE, TRAINING, OFFLINE, QUARANTINED = range(len(STATES))
