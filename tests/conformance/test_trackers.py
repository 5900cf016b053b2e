"""The tracker that is built in keeps what a tracker promises."""

from __future__ import annotations

import json
from pathlib import Path

from anabranch.reports.trackers import METRICS_FILE, JsonLines
from anabranch.testing import TrackerConformance


class TestJsonLines(TrackerConformance):
    tracker = JsonLines

    def read(self, folder: Path) -> list[tuple[int, dict[str, float]]]:
        rows = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
        return [(row.pop("version"), row) for row in rows]
