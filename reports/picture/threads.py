"""The tasks of a run, a row each: where a device left the versions, and where its update counted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

from anabranch.reports.picture.columns import Columns, Texts

VERDICTS = ("open", "applied", "held", "rejected", "lost")
OPEN, APPLIED, HELD, REJECTED, LOST = range(len(VERDICTS))
NONE = -1
LAPSED_MAX = 100_000  # tasks whose lease has ended, and whose update may still come


class Words:
    """A few words by number; 0 is the empty one."""

    def __init__(self) -> None:
        self.all, self._numbers = [""], {"": 0}

    def __getitem__(self, number: int) -> str:
        return self.all[number]

    def number(self, word: str) -> int:
        """Its number, a new one where it was never there."""
        if word not in self._numbers:
            self._numbers[word] = len(self.all)
            self.all.append(word)
        return self._numbers[word]


class Threads:
    """Every task that was granted. A row begins with `granted`, and has its end from `ended` on.

    `left` and `joined` are seconds, `base` and `version` numbers of versions; NaN and `NONE`: not yet, or not
    known.
    """

    def __init__(self) -> None:
        self.columns = Columns(
            device=np.int32,
            base=np.int64,
            left=np.float64,
            joined=np.float64,
            version=np.int64,
            staleness=np.int32,
            verdict=np.int8,
            reason=np.int16,
            codec=np.int16,
            weight=np.float32,
            up=np.int64,
            raw=np.int64,
            down=np.int64,
        )
        self.tasks = Texts()
        self.reasons, self.codecs = Words(), Words()
        self.metrics: dict[str, str] = {}  # the column of each
        self._open: dict[str, int] = {}
        self._lapsed: dict[str, int] = {}
        self._of_device: dict[int, deque[int]] = {}
        self._waiting: list[int] = []  # what was folded, and no version has come of it yet

    def __len__(self) -> int:
        return len(self.columns)

    def granted(self, device: int, task: str, base: int, t: float) -> int:
        """A device got a task."""
        row = self.columns.add(device, base, t, math.nan, NONE, NONE, OPEN, 0, 0, math.nan, 0, 0, 0)
        self.tasks.add(task)
        for name in self.metrics.values():
            self.columns.cells[name][row] = math.nan
        self._open[task] = row
        self._of_device.setdefault(device, deque()).append(row)
        return row

    def newest_open(self, device: int) -> int | None:
        """The task that a device got last, of those that are open."""
        rows = self._of_device.get(device)
        return rows[-1] if rows else None

    def of_update(self, device: int, task: str) -> int | None:
        """The row of a task that an update is of; its oldest open one where nobody has said which."""
        if task:
            row = self._open.get(task)
            return self._lapsed.pop(task, None) if row is None else row
        rows = self._of_device.get(device)
        return rows[0] if rows else None

    def ended(self, row: int, t: float, verdict: int, task: str = "", lapsed: bool = False) -> bool:
        """The task is over; whether it was open. `lapsed`: its update may still come."""
        cells = self.columns.cells
        cells["joined"][row] = t
        cells["verdict"][row] = verdict
        task = task or self.tasks[row]
        rows = self._of_device.get(cells["device"][row])
        was_open = rows is not None and row in rows
        if rows is not None and was_open:
            rows.remove(row)
        self._open.pop(task, None)
        if lapsed:
            self._lapsed[task] = row
            if len(self._lapsed) > LAPSED_MAX:
                del self._lapsed[next(iter(self._lapsed))]
        if verdict == HELD:
            self._waiting.append(row)
        return was_open

    def published(self, version: int) -> None:
        """What was folded counts in this version."""
        versions, verdicts = self.columns.cells["version"], self.columns.cells["verdict"]
        for row in self._waiting:
            versions[row], verdicts[row] = version, APPLIED
        self._waiting.clear()

    def open_of(self, device: int) -> list[int]:
        """The open tasks of a device."""
        return list(self._of_device.get(device, ()))

    def open_task(self, task: str) -> int | None:
        """The row of an open task."""
        return self._open.get(task)

    def measured(self, row: int, metrics: Iterable[tuple[str, float]]) -> None:
        """What the device says of its training."""
        for name, value in metrics:
            if name not in self.metrics:
                self.metrics[name] = f"metric{len(self.metrics)}"
                self.columns.add_column(self.metrics[name], np.float32, np.nan)
            self.columns.cells[self.metrics[name]][row] = value

    @property
    def size_bytes(self) -> int:
        """What it takes of memory."""
        return self.columns.size_bytes + self.tasks.size_bytes
