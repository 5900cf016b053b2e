"""A tracker of one's own: a line of CSV for each measurement, for a spreadsheet."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from typing import Any, TextIO

from anabranch.reports.tracking.run import TrackedRun


class Csv:
    name = "csv"

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def start(self, run: TrackedRun) -> None:
        assert run.folder is not None, "give the run a folder"
        run.folder.mkdir(parents=True, exist_ok=True)
        self._file = (run.folder / "metrics.csv").open("a", encoding="utf-8", newline="", buffering=1)

    def metrics(self, version: int, values: Mapping[str, float]) -> None:
        assert self._file is not None, "started"
        csv.writer(self._file).writerow([version, *(f"{name}={value!r}" for name, value in values.items())])

    def finish(self, result: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.close()
