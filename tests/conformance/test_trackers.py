"""The tracker that is built in keeps what a tracker promises."""

from __future__ import annotations

import json
from pathlib import Path

import anabranch
from anabranch.reports.trackers import METRICS_FILE, JsonLines, tell_of
from anabranch.testing import TrackerConformance


class TestJsonLines(TrackerConformance):
    tracker = JsonLines

    def read(self, folder: Path) -> list[tuple[int, dict[str, float]]]:
        rows = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
        return [(row.pop("version"), row) for row in rows]


def test_what_is_told_again_stands_there_once(tmp_path: Path) -> None:
    run = anabranch.simulate("synthetic", until=anabranch.Until(updates=30), out=tmp_path / "run")
    for _ in range(2):
        tell_of(run.result, tmp_path / "run", ["jsonl"])
    rows = [json.loads(line) for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines()]
    assert [row["version"] for row in rows] == [point.version for point in run.result.history]
